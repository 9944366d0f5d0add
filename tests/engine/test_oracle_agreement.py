"""H = oracle: SmolLM2 in float32, evicted tokens and outputs exactly as the algorithm says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import MODEL, engine
from tests.oracle import Oracle

NEW_TOKENS = 304  # all past the budget, since every prompt is at least that long


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODEL)


@pytest.mark.parametrize("budget", [128, 256, 512])
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize(
    "scores",
    [
        pytest.param({}, id="paper"),
        pytest.param({"score_half_life": 32.0, "score_pool": 15}, id="half-life-and-pool"),
    ],
)
def test_engine_keeps_what_the_oracle_keeps(
    budget: int, granularity: str, scores: dict[str, Any], oracle: Oracle, text_ids: list[int]
) -> None:
    # One chunk, one more than the budget, no block multiple, two chunks, three chunks.
    lengths = [budget, budget + 1, budget + 45, max(budget, 256) + 33, 600]
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate(lengths)]
    policy = {"budget": budget, "granularity": granularity, **scores}
    with engine(policy={**policy, "trace": True}, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, oracle_config(policy), prompts, NEW_TOKENS)
