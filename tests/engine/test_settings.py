"""Each setting by itself changes what is kept exactly as the oracle says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import engine
from tests.oracle import Oracle
from tests.tiny_models import random_prompt, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama-gqa", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def oracle(model: str) -> Oracle:
    return Oracle(model)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"budget": 192, "score_half_life": 8.0}, id="half-life-alone"),
        pytest.param({"budget": 192, "score_pool": 3}, id="pool-alone"),
        pytest.param({"budget": 192, "recent": 0, "pin_tokens": 0}, id="nothing-protected"),
        pytest.param({"budget": 192, "recent": 45, "pin_tokens": 64}, id="odd-recent-two-pinned"),
        pytest.param({"budget": 160, "recent": 96, "pin_tokens": 32}, id="just-pinned-recent-block"),
    ],
)
def test_setting(policy: dict[str, Any], model: str, oracle: Oracle) -> None:
    prompts = [random_prompt(40, seed=1), random_prompt(430, seed=2)]
    options = {"enable_prefix_caching": False, "skip_tokenizer_init": True}
    with engine(model, policy={**policy, "trace": True}, **options) as llm:
        assert_engine_agrees(llm, oracle, oracle_config(policy), prompts, 230)
