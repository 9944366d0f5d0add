"""Contexts longer than the whole KV pool."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import engine
from tests.stepping import Stepper
from tests.tiny_models import MAX_POSITIONS, random_prompt, save


def test_prompt_and_sequence_above_the_pool_are_served(tmp_path: Path) -> None:
    """19 usable blocks are 608 tokens; plain vLLM refuses to start with this max_model_len."""
    model = str(save("llama-gqa", tmp_path))
    options = {"num_gpu_blocks_override": 20, "max_model_len": 2048, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="max seq len"), engine(model, **options):
        pass
    with engine(model, policy={"budget": 256}, **options) as llm:
        stepper = Stepper(llm)
        free = stepper.free_blocks
        stepper.add("long", random_prompt(1900), 140)
        assert len(stepper.run()["long"]) == 140
        stepper.assert_idle(free)


def test_automatic_length_keeps_the_models_length(tmp_path: Path) -> None:
    """``--max-model-len auto`` shrinks the length to what fits; with a budget the whole length does."""
    model = str(save("llama-gqa", tmp_path))
    options = {"num_gpu_blocks_override": 20, "max_model_len": -1, "skip_tokenizer_init": True}
    with engine(model, policy={"budget": 256}, **options) as llm:
        assert llm.llm_engine.model_config.max_model_len == MAX_POSITIONS
    with engine(model, **options) as llm:
        assert llm.llm_engine.model_config.max_model_len < MAX_POSITIONS
