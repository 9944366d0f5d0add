"""What may be reused, from the rule alone: nothing that a cut has written to, and nothing that starts cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_request_limits import BLOCK
from tests.test_request_limits import POLICY as SERVER
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.prompt_reuse import PromptReuse
from vllm_h2o.request_limits import RequestLimits, RequestTable

POLICY = replace(SERVER, pinned_blocks=2, score_half_life_tokens=2.0)
OWN, WINDOW = 48, 32  # 24 half-lives, and snapkv's
POLICIES = {
    "no prompt budget": POLICY,
    "prompt budget": replace(POLICY, prompt_budget_tokens=512),
    "window": replace(POLICY, name="snapkv", score_window_tokens=WINDOW, score_half_life_tokens=None),
    "keys": replace(POLICY, name="keydiff", rank_by="keys", prompt_budget_tokens=256),
}


def limits_of(
    policy: KVPolicyConfig, asked: dict[str, object] | None, num_prompt_tokens: int
) -> RequestLimits:
    table = RequestTable(policy)
    assert table.add("request", asked, num_prompt_tokens) is None
    return table.of("request")


ASKED = st.sampled_from([None, {"kv_budget": 80}, {"kv_pin_tokens": 48}, {"kv_policy": "none"}])


@given(
    st.sampled_from(sorted(POLICIES)), ASKED, st.integers(1, 700), st.integers(0, 250), st.integers(1, 256)
)
def test_offered_blocks_are_as_computed(
    name: str, asked: dict[str, object] | None, num_prompt: int, num_answer: int, chunk: int
) -> None:
    """Follow a request step by step and note which blocks a cut has written to, or might have."""
    policy = POLICIES[name]
    limits = limits_of(policy, asked, num_prompt)
    reuse = PromptReuse(policy)
    computed, gone, changed_from = 0, 0, 10_000
    while computed < num_prompt + num_answer:
        step = min(chunk, num_prompt - computed) if computed < num_prompt else 1
        # Whoever attends to a gap computes something else than the text alone would give.
        if gone:
            changed_from = min(changed_from, computed // BLOCK)
        computed += step
        after = limits.evicted_blocks(computed, BLOCK)
        if after > gone:
            # Survivors go into any block that stays.
            changed_from = min(changed_from, limits.pinned_blocks + after)
        gone = after
        offered = reuse.offered_tokens(limits, num_prompt_tokens=num_prompt, num_computed_tokens=computed)
        assert min(offered, computed) // BLOCK <= max(changed_from, policy.pinned_blocks)


@given(st.sampled_from(sorted(POLICIES)), ASKED, st.integers(1, 700), st.integers(1, 300))
def test_used_blocks_are_all_there_at_the_start(
    name: str, asked: dict[str, object] | None, num_prompt: int, num_answer: int
) -> None:
    policy = POLICIES[name]
    limits = limits_of(policy, asked, num_prompt)
    most = min(num_prompt + num_answer, policy.max_model_len)
    usable = PromptReuse(policy).usable_tokens(limits, num_prompt_tokens=num_prompt, most_tokens=most)
    if usable > policy.pinned_tokens:
        assert limits.evicted_blocks(usable, BLOCK) == 0
        assert usable < num_prompt
        if limits.evicted_blocks(most, BLOCK) and policy.scores_attention:
            assert num_prompt - usable >= (WINDOW if name == "window" else OWN)


def test_what_a_prompt_leaves_behind() -> None:
    reuse = PromptReuse(POLICIES["prompt budget"])
    limits = limits_of(POLICIES["prompt budget"], None, 400)
    lengths = {"num_prompt_tokens": 400}
    assert reuse.offered_tokens(limits, num_computed_tokens=300, **lengths) == 300
    # (400 - 128) // 16 + 1 blocks go behind the two pinned ones.
    assert reuse.offered_tokens(limits, num_computed_tokens=400, **lengths) == (2 + 18) * BLOCK
    assert reuse.offered_tokens(limits, num_computed_tokens=480, **lengths) == (2 + 18) * BLOCK
    assert reuse.usable_tokens(limits, num_prompt_tokens=400, most_tokens=440) == 400 - OWN
    longer = limits_of(POLICIES["prompt budget"], None, 600)
    assert reuse.offered_tokens(longer, num_prompt_tokens=600, num_computed_tokens=600) == 32
    assert reuse.usable_tokens(longer, num_prompt_tokens=600, most_tokens=640) == 511


@pytest.mark.parametrize(
    ("policy", "is_on"),
    [
        (POLICY, True),
        (POLICIES["window"], True),
        (POLICIES["keys"], True),
        (replace(POLICY, score_half_life_tokens=None), False),
        (replace(POLICY, score_half_life_tokens=50.0), False),
        (replace(POLICY, budget_tokens=1008), False),
    ],
)
def test_where_it_is_off(policy: KVPolicyConfig, is_on: bool) -> None:
    assert PromptReuse(policy).is_on == is_on
