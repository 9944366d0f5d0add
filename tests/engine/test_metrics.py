"""Metrics of an engine: figures that follow from the lengths of its requests, and none without a policy."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import REGISTRY

from tests.engines import complete, engine, greedy
from vllm_h2o import retention

BUDGET, BLOCK, CHUNK = 256, 32, 256
LENGTHS = ((600, 100), (120, 40), (300, 10))
"""Tokens of prompt and answer; the second stays under the budget."""


def of_policy() -> dict[str, float]:
    """Samples of all metrics of ours, by name without the prefix; one engine."""
    found: dict[str, float] = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name.startswith("vllm:kv_policy_") and "le" not in sample.labels:
                assert sample.labels.get("engine", "0") == "0"
                found[sample.name.removeprefix("vllm:kv_policy_")] = sample.value
    return found


def evicted_blocks(computed: int) -> int:
    return retention.evicted_blocks(computed, budget_tokens=BUDGET, block_size=BLOCK)


def settled(prompt: int, answer: int) -> int:
    """Tokens whose step is settled when a request's last step begins, which is when it is last looked at."""
    return prompt + answer - 2


@contextmanager
def listening() -> Iterator[list[str]]:
    """Lines of the loggers of statistics. Inside an engine: vLLM configures logging anew when it starts."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("vllm.h2o.metrics", "vllm.v1.metrics.loggers")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    yield lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.e2e
def test_figures_of_requests(text_ids: list[int]) -> None:
    policy: dict[str, Any] = {"budget": BUDGET}
    with engine(policy=policy, disable_log_stats=False, async_scheduling=False) as llm:
        start = of_policy()
        assert set(start) >= {
            *("evicted_blocks_total", "evicted_tokens_total", "requests_evicted_total", "info"),
            *("requests_over_budget", "live_tokens", "logical_tokens", "score_memory_bytes"),
            *("scoring_seconds_count", "scoring_seconds_sum", "compaction_seconds_count"),
        }
        assert start["refused_requests_total"] == 0
        assert all(start[name] == 0 for name in start if name not in ("info",) and "created" not in name)
        prompts = [text_ids[:prompt] for prompt, _ in LENGTHS]
        complete(llm, prompts, [greedy(answer) for _, answer in LENGTHS])
        found = of_policy()
        lost = [evicted_blocks(settled(prompt, answer)) for prompt, answer in LENGTHS]
        assert lost[0] > lost[2] > lost[1] == 0
        assert found["evicted_blocks_total"] == sum(lost)
        assert found["evicted_tokens_total"] == BLOCK * sum(lost)
        assert found["requests_evicted_total"] == 2
        assert found["compaction_seconds_count"] > 2
        assert 0 < found["compaction_seconds_sum"] < 60
        assert 0 < found["scoring_seconds_sum"] < 60
        # Scores of 30 layers and 3 KV heads, float32, in each of 256 blocks.
        assert found["score_memory_bytes"] == 30 * 3 * 4 * BLOCK * 256
        with listening() as said:
            llm.llm_engine.logger_manager.log()
            llm.llm_engine.logger_manager.log()
    assert not any("KV fetch" in line for line in said), "vLLM's own loggers don't see our items"
    ours = [line for line in said if "KV policy" in line]
    assert len(ours) == 1, "nothing is said where nothing was dropped"
    assert f"KV policy h2o: {BLOCK * sum(lost)} tokens dropped" in ours[0]


@pytest.mark.e2e
def test_gauges_while_a_request_runs(text_ids: list[int]) -> None:
    with engine(policy={"budget": BUDGET}, disable_log_stats=False, async_scheduling=False) as llm:
        core = llm.llm_engine
        core.add_request("long", {"prompt_token_ids": text_ids[:600]}, greedy(64))
        core.add_request("short", {"prompt_token_ids": text_ids[:90]}, greedy(64))
        seen = []
        while core.has_unfinished_requests():
            core.step()
            seen.append(of_policy())
        assert max(now["requests_over_budget"] for now in seen) == 1
        assert all(0 <= now["live_tokens"] <= now["logical_tokens"] for now in seen)
        # After its step a request holds fewer tokens than its budget; the short one adds up to 154.
        assert max(now["live_tokens"] for now in seen[4:]) < BUDGET + 154
        assert max(now["logical_tokens"] for now in seen) > 700
        assert seen[-1]["live_tokens"] == seen[-1]["logical_tokens"] == 0
        assert seen[-1]["requests_over_budget"] == 0


@pytest.mark.e2e
def test_no_policy_no_metrics(text_ids: list[int]) -> None:
    with engine(disable_log_stats=False) as llm:
        complete(llm, [text_ids[:300]], greedy(8))
        assert of_policy() == {}
