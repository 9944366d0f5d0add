"""Every kind of attention that vLLM's CPU backend serves: nothing evicted = plain, evicted = oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import complete, engine, greedy
from tests.oracle import Oracle
from tests.tiny_models import CONFIGS, VOCAB_SIZE, save


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    # vLLM runs some families (GPT-NeoX) on Hugging Face's own class and decorates it in place for
    # torch.compile. The oracle's instance is made before, and told to stay what it was.
    oracle = Oracle(model)
    for module in oracle.model.modules():
        module.do_not_compile = True
    return oracle


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (20, 190, 700)
    ]


def test_unlimited_equals_plain(model: Path, oracle: Oracle, prompts: list[list[int]]) -> None:
    with engine(str(model), skip_tokenizer_init=True) as llm:
        plain = complete(llm, prompts, greedy(60, detokenize=False))
    with engine(str(model), policy={"budget": 1024}, skip_tokenizer_init=True) as llm:
        unlimited = complete(llm, prompts, greedy(60, detokenize=False))
    assert [c.token_ids for c in unlimited] == [c.token_ids for c in plain]
    for ours, theirs in zip(unlimited, plain, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.parametrize("granularity", ["token", "block"])
def test_evicted_equals_oracle(
    model: Path, oracle: Oracle, prompts: list[list[int]], granularity: str
) -> None:
    policy = {"budget": 128, "granularity": granularity, "score_half_life": 64.0, "score_pool": 3}
    with engine(
        str(model),
        policy={**policy, "trace": True},
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    ) as llm:
        assert_engine_agrees(llm, oracle, oracle_config(policy), prompts, 150)
