"""Limits that a request may ask for, and those that it may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o import retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.request_limits import RequestLimits, RequestTable, ranges

BLOCK = 16
POLICY = KVPolicyConfig(
    name="h2o",
    block_size=BLOCK,
    budget_tokens=128,
    recent_tokens=24,
    pinned_blocks=1,
    granularity="token",
    score_half_life_tokens=32.0,
    score_pool=5,
    max_model_len=1000,
    max_in_flight_tokens=64,
)
EVICTS_NOTHING = replace(POLICY, budget_tokens=1008)


@pytest.mark.parametrize(
    ("asked", "budget", "pinned"),
    [
        (None, 128, 1),
        ({}, 128, 1),
        ({"repetition": 3, "kv_transfer_params": {}}, 128, 1),
        ({"kv_budget": None}, 128, 1),
        ({"kv_report": 1}, 128, 1),
        ({"kv_budget": 128, "kv_pin_tokens": 16}, 128, 1),
        ({"kv_budget": 96}, 96, 1),
        ({"kv_budget": 96.0}, 96, 1),
        ({"kv_budget": "96"}, 96, 1),
        ({"kv_budget": 81}, 96, 1),
        ({"kv_pin_tokens": 17}, 128, 2),
        ({"kv_budget": 100, "kv_pin_tokens": 64}, 112, 4),
        ({"kv_policy": "none"}, 1024, 1),
        ({"kv_policy": "none", "kv_report": 1}, 1024, 1),
    ],
)
def test_what_a_request_gets(asked: dict[str, Any] | None, budget: int, pinned: int) -> None:
    assert RequestLimits.of_request(asked, POLICY) == RequestLimits(budget, pinned)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"kv_budget": 129},
            r"kv_budget=129: it is over the server's budget of 128 tokens. Give at most 128",
        ),
        ({"kv_budget": 10**30}, "over the server's budget"),
        ({"kv_budget": 0}, "kv_budget=0: it must be a whole number of at least 1"),
        ({"kv_budget": -5}, "at least 1"),
        ({"kv_budget": 96.5}, "at least 1"),
        ({"kv_budget": "many"}, "kv_budget='many': it is not a finite number"),
        ({"kv_budget": float("nan")}, "not a finite number"),
        ({"kv_budget": [96]}, "not a finite number"),
        ({"kv_budget": True}, "not a finite number"),
        ({"kv_budget": 48}, "48 tokens can't hold 16 pinned . 24 recent . one block of 16"),
        ({"kv_pin_tokens": 15}, "kv_pin_tokens=15: it must be a whole number of at least 16"),
        ({"kv_pin_tokens": 96}, "kv_pin_tokens=96: 128 tokens can't hold 96 pinned"),
        ({"kv_budget": 96, "kv_pin_tokens": 64}, "can't hold 64 pinned"),
        ({"kv_policy": "h2o"}, "kv_policy='h2o': a request can't choose a policy; the server's is h2o"),
        ({"kv_policy": "none", "kv_budget": 96}, "kv_budget=96: it has no effect with kv_policy none"),
        ({"kv_policy": "none", "kv_pin_tokens": 32}, "kv_pin_tokens=32: it has no effect"),
        ({"kv_report": "yes"}, "kv_report='yes': it must be 0 or 1"),
        ({"kv_bugdet": 96}, "kv_bugdet=96: there is no such argument. Write kv_budget"),
        ({"kv_pin_token": 96}, "Write kv_pin_tokens"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RequestLimits.of_request(asked, POLICY)


def test_a_server_that_drops_nothing() -> None:
    with pytest.raises(ConfigError, match="this server's budget covers its longest sequence"):
        RequestLimits.of_request({"kv_budget": 96}, EVICTS_NOTHING)
    limits = RequestLimits.of_request({"kv_policy": "none"}, EVICTS_NOTHING)
    assert limits.budget_tokens > POLICY.max_model_len


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("abc019.-e ", max_size=5),
    st.lists(st.integers(), max_size=2),
)


@given(
    st.dictionaries(st.sampled_from(["kv_budget", "kv_pin_tokens", "kv_policy", "kv_report", "x"]), VALUES)
)
def test_any_values_give_limits_that_work_or_a_refusal(asked: dict[str, Any]) -> None:
    try:
        limits = RequestLimits.of_request(asked, POLICY)
    except ConfigError:
        return
    assert limits.budget_tokens % BLOCK == 0
    assert POLICY.pinned_blocks <= limits.pinned_blocks
    assert limits.budget_tokens >= limits.pinned_blocks * BLOCK + POLICY.recent_tokens + BLOCK
    assert limits.budget_tokens <= POLICY.budget_tokens or limits.budget_tokens > POLICY.max_model_len


def test_both_ends_of_the_ranges_are_accepted_and_nothing_beyond() -> None:
    for field, (least, most) in ranges(POLICY).items():
        for value in (least, most):
            RequestLimits.of_request({field: value}, POLICY)
        for value in (least - BLOCK, most + 1):
            with pytest.raises(ConfigError):
                RequestLimits.of_request({field: value}, POLICY)


def test_arguments_that_nobody_checked_give_the_policys_limits() -> None:
    table = RequestTable(POLICY)
    wrong = table.add("odd", {"kv_budget": 1}, 50)
    assert wrong is not None
    assert "can't hold" in str(wrong)
    assert table.of("odd") == RequestLimits.of_policy(POLICY)


def test_a_table_knows_those_with_limits_of_their_own() -> None:
    table = RequestTable(POLICY)
    table.add("plain", None, 50)
    table.add("same", {"kv_budget": 128}, 50)
    assert len(table) == 0
    assert table.rows(["plain", "same"]) is None
    table.add("small", {"kv_budget": 64}, 50)
    table.add("free", {"kv_policy": "none"}, 50)
    rows = table.rows(["free", "plain", "small"])
    assert rows is not None
    assert rows.budget_tokens.tolist() == [1024, 128, 64]
    assert rows.pinned_blocks.tolist() == [1, 1, 1]
    table.forget(["small", "never there", "free"])
    assert table.of("small") == RequestLimits.of_policy(POLICY)
    assert len(table) == 0


def planned(
    totals: list[int],
    news: list[int],
    asked: list[dict[str, Any] | None],
    policy: KVPolicyConfig = POLICY,
    prompts: list[int] | None = None,
) -> Any:
    planner = StepPlanner(policy, QueryRing(8, BLOCK), None)
    table = RequestTable(policy)
    names = [str(i) for i in range(len(asked))]
    for name, extra_args, prompt in zip(names, asked, prompts or [50] * len(asked), strict=True):
        table.add(name, extra_args, prompt)
    blocks = 1 + np.arange(len(totals) * 64, dtype=np.int32).reshape(len(totals), 64)
    starts = np.concatenate([[0], np.cumsum(news)])
    batch = planner.batch(np.array(totals), starts, blocks, table.rows(names))
    return batch, planner.plan(batch), blocks


def test_rows_of_one_step_follow_their_own_rule() -> None:
    asked = [None, {"kv_budget": 64}, {"kv_pin_tokens": 48}, {"kv_policy": "none"}]
    batch, plan, blocks = planned([400] * 4, [100] * 4, asked)
    budgets = [128, 64, 128, 1024]
    gone = [retention.evicted_blocks(300, budget_tokens=b, block_size=BLOCK) for b in budgets]
    assert batch.gap_blocks.tolist() == gone == [11, 15, 11, 0]
    for row, pinned in enumerate([1, 1, 3, 1]):
        live = -(-400 // BLOCK) - gone[row]
        expected = np.delete(blocks[row], np.s_[pinned : pinned + gone[row]])[:live]
        assert batch.live_table[row, :live].tolist() == expected.tolist()
    # The last one is neither scored nor cut, but its blocks begin: the pinned ones may be shared.
    assert set(blocks[3, -(-300 // BLOCK) : 25]) <= set(plan.started_blocks)
    assert plan.drops.num_dropped.tolist() == [7 * BLOCK] * 3
    assert plan.drops.pinned_tokens.tolist() == [16, 16, 48]
    assert [rows.num_live.size for rows in plan.scores] == [3]


def test_rows_behind_the_requests_are_padding() -> None:
    batch, _, _ = planned([400, 400, 0], [100, 1, 0], [{"kv_budget": 64}])
    assert batch.gap_blocks_after.tolist() == [22, 18, 0]


def test_a_prompt_may_have_a_larger_budget_until_it_is_read() -> None:
    policy = replace(POLICY, prompt_budget_tokens=320)
    # In the prompt, at its last chunk, in its answer; one with its own budget; one that keeps everything.
    asked = [None, None, None, {"kv_budget": 64}, {"kv_policy": "none"}]
    batch, plan, _ = planned(
        [400, 400, 401, 400, 400], [100, 100, 1, 100, 100], asked, policy, [500, 400, 400, 400, 400]
    )
    done = (400 - 128) // BLOCK + 1
    assert batch.gap_blocks.tolist() == [0, 0, done, 0, 0]
    assert batch.gap_blocks_after.tolist() == [6, done, done, (400 - 64) // BLOCK + 1, 0]
    assert plan.drops.num_dropped.tolist() == [6 * BLOCK, done * BLOCK, 22 * BLOCK]


@given(st.data())
def test_scheduler_and_rows_agree_and_what_is_gone_stays_gone(data: st.DataObject) -> None:
    prompt = data.draw(st.integers(1, 500))
    policy = replace(POLICY, prompt_budget_tokens=data.draw(st.sampled_from([None, 144, 320, 1008])))
    asked = data.draw(
        st.sampled_from([None, {"kv_budget": 80}, {"kv_pin_tokens": 64}, {"kv_policy": "none"}])
    )
    table = RequestTable(policy)
    table.add("r", asked, prompt)
    limits, rows, before, computed = table.of("r"), table.rows(["r"]), 0, 0
    largest = max(policy.prompt_budget_tokens or 0, limits.budget_tokens)
    while computed < 700:
        computed += data.draw(st.integers(1, 130)) if computed < prompt else 1
        gone = limits.evicted_blocks(computed, BLOCK)
        assert gone >= before
        assert computed - gone * BLOCK < largest
        if rows is not None:
            budget = rows.budget_at(np.array([computed]))
            assert (
                retention.evicted_blocks(np.array([computed]), budget_tokens=budget, block_size=BLOCK) == gone
            )
        before = gone
