"""H = oracle: SmolLM2 in float32, evicted tokens and outputs exactly as the algorithm says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import MODEL, complete, engine, greedy
from tests.oracle import Oracle
from tests.tiny_models import first_layers

PAPER: dict[str, Any] = {"preset": "paper", "pin_tokens": 32}
DEFAULTS: dict[str, Any] = {"score_half_life": 32.0, "score_pool": 15, "recent": 25}
"""Of h2o with a budget of 256: these are said to the oracle only."""

NEW_TOKENS = 136  # all past the budget, since every prompt is at least that long


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Oracle]]:
    """The model and its first 8 of 30 layers, on which the settings that aren't the default run."""
    short = str(first_layers(Path(MODEL), 8, tmp_path_factory.mktemp("models")))
    return {"whole": (MODEL, Oracle(MODEL)), "short": (short, Oracle(short))}


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
    budget: int,
    granularity: str,
    scores: dict[str, Any],
    oracles: dict[str, tuple[str, Oracle]],
    text_ids: list[int],
) -> None:
    model, oracle = oracles["whole" if budget == 256 else "short"]
    # One chunk or two that end with the budget, no block multiple, three chunks.
    lengths = [budget, budget + 45, 600]
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate(lengths)]
    policy = {"budget": budget, "granularity": granularity, **scores}
    with engine(model, policy={**policy, "trace": True}, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, oracle_config(policy), prompts, NEW_TOKENS)


@pytest.mark.parametrize(
    ("name", "rank", "written"),
    [
        ("h2o", "value", DEFAULTS),
        # Queries older than 72 tokens are not scored, of chunks of 256: the oracle counts them all.
        ("h2o", "value", {"score_half_life": 3.0, "score_pool": 15, "recent": 25}),
        ("h2o", "mean", {**PAPER, "score_rank": "mean"}),
        ("h2o", "value", {**PAPER, "score_rank": "value", "granularity": "block"}),
        ("snapkv", "sum", {"score_window": 16, "score_pool": 7, "recent": 32}),
        ("tova", "sum", {"recent": 0}),
        ("keydiff", "keys", {"recent": 0}),
        ("random", "random", {}),
        ("streaming", "age", {}),
    ],
)
def test_engine_keeps_what_other_policies_say(
    name: str,
    rank: str,
    written: dict[str, Any],
    oracles: dict[str, tuple[str, Oracle]],
    text_ids: list[int],
) -> None:
    model, oracle = oracles["whole" if written is DEFAULTS else "short"]
    budget = 256
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate([200, 600])]
    config = oracle_config({"budget": budget, **written}, rank=rank)
    if name == "tova":
        config = replace(config, window_tokens=1)
    if name == "streaming":
        config = replace(config, recent_tokens=0)
    # The cosine of two keys is near 1, so its distance from 1 carries more rounding.
    rtol = 1e-4 if rank == "keys" else 1e-5
    policy = {"name": name, "budget": budget, **(written if written is not DEFAULTS else {})}
    with engine(model, policy={**policy, "trace": True}, enable_prefix_caching=False) as llm:
        traced = assert_engine_agrees(llm, oracle, config, prompts, 96, rtol)
    if name != "streaming":
        return
    # Without tracing it does no work at all; the answers must be the same.
    with engine(model, policy=policy, enable_prefix_caching=False) as llm:
        assert [c.token_ids for c in complete(llm, prompts, greedy(96))] == [c.token_ids for c in traced]
