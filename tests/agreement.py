"""Compares what an engine did with what the oracle says it should have done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from vllm import LLM

from tests.engines import Completion, complete, greedy, take_traces
from tests.oracle import Oracle, OracleConfig


def oracle_config(policy: dict[str, Any], block_size: int = 32, rank: str | None = None) -> OracleConfig:
    """The oracle's words for policy settings; everything the tests vary is given explicitly."""
    return OracleConfig(
        block_size=block_size,
        budget_tokens=policy["budget"],
        pinned_blocks=policy.get("pin_tokens", block_size) // block_size,
        recent_tokens=policy.get("recent", policy["budget"] // 2),
        granularity=policy.get("granularity", "token"),
        half_life_tokens=policy.get("score_half_life"),
        pool=policy.get("score_pool", 1),
        window_tokens=policy.get("score_window"),
        rank=rank or policy.get("score_rank", "sum"),
    )


def assert_engine_agrees(
    llm: LLM,
    oracle: Oracle,
    config: OracleConfig | Sequence[OracleConfig],
    prompts: Sequence[list[int]],
    max_tokens: int,
    follow_rtol: float = 1e-5,
    extra_args: Sequence[dict[str, Any] | None] | None = None,
) -> list[Completion]:
    """Run prompts together on a tracing engine; tokens, logprobs and kept positions must be the oracle's.

    Where prompts have arguments of their own, there is a configuration for each.

    The oracle is fed the engine's tokens in the engine's steps, so equality of every argmax is equality of
    the greedy outputs. Kept positions are compared inside ``Oracle.run``, which raises on a difference that
    isn't a near-tie; near-ties may be at most one choice in a thousand.
    """
    take_traces(llm)
    configs = [config] * len(prompts) if isinstance(config, OracleConfig) else config
    params = [greedy(max_tokens, extra_args=extra) for extra in extra_args or [None] * len(prompts)]
    completions = complete(llm, prompts, params)
    traces = take_traces(llm)
    assert len(traces) == len(prompts)
    num_choices = num_followed = 0
    for completion, trace, own in zip(completions, traces, configs, strict=True):
        result = oracle.run(completion.fed_ids, trace.step_sizes, own, trace.kept, follow_rtol=follow_rtol)
        logprobs = torch.log_softmax(result.logits[len(completion.prompt_ids) - 1 :], dim=-1)
        chosen = torch.tensor(completion.token_ids)
        assert logprobs.argmax(dim=-1).tolist() == completion.token_ids
        expected = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
        num_choices += result.num_choices
        num_followed += result.num_followed
        # With positions tracked, ties go by age on both sides, so an exact tie is no excuse.
        assert result.num_followed_equal == 0 or own.pool == 1
    assert num_choices > 0, "nothing was evicted, so nothing was tested"
    assert num_followed <= num_choices / 1000
    return completions
