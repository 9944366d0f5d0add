"""Plans for block tables on a device, against those for tables on the host, over random schedules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import Schedule
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.device_plan import DevicePlanner, DeviceTable
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.request_ring import RequestRing
from vllm_h2o.step_plan import DropRows, ScoreRows, StepPlan

BLOCK, MAX_REQUESTS, WIDTH = 4, 5, 40


def config(name: str) -> KVPolicyConfig:
    return KVPolicyConfig(
        name=name,
        block_size=BLOCK,
        budget_tokens=24,
        recent_tokens=5,
        pinned_blocks=1,
        granularity="token",
        score_half_life_tokens=9.0 if name == "h2o" else None,
        score_pool=1,
        max_model_len=WIDTH * BLOCK,
        max_in_flight_tokens=64,
        score_window_tokens=3,
        rank_by="sum",
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(["h2o", "snapkv"]))
def test_both_plan_the_same(seed: int, name: str) -> None:
    policy = config(name)
    host = StepPlanner(policy, QueryRing(200, BLOCK), None)
    device = DevicePlanner(policy, RequestRing(MAX_REQUESTS, BLOCK))
    schedule = Schedule(policy, seed, max_requests=MAX_REQUESTS)
    for _ in range(120):
        step = schedule.step()
        if not step.requests:
            continue
        seq_lens, starts = np.array(step.totals), np.concatenate([[0], np.cumsum(step.new)])
        expected = host.plan(host.batch(seq_lens, starts, step.table))
        # A row of padding behind, as in a CUDA graph.
        seq_lens, starts = np.append(seq_lens, 0), np.append(starts, starts[-1])
        on_device = torch.from_numpy(np.pad(step.table, ((0, 1), (0, 0))))
        batch = device.device_batch(seq_lens, starts, on_device, np.array(step.requests))
        check(device.plan(batch), expected, on_device)


def check(found: StepPlan, expected: StepPlan, table: torch.Tensor) -> None:
    np.testing.assert_array_equal(found.append_tokens, expected.append_tokens)
    np.testing.assert_array_equal(found.append_slots % BLOCK, expected.append_slots % BLOCK)
    assert found.table is table
    started = torch.take(table, torch.from_numpy(found.started_blocks))
    np.testing.assert_array_equal(started.numpy(), expected.started_blocks)
    np.testing.assert_array_equal(found.started_positions, expected.started_positions)
    assert len(found.scores) == len(expected.scores)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        check_rows(ours, theirs, ("from_ring", "num_queries", "num_live", "weights", "decay"))
        first = ours.first_query, theirs.first_query
        if ours.from_ring.all():
            first = first[0] % BLOCK, first[1] % BLOCK
        np.testing.assert_array_equal(*first)
    assert (found.drops is None) == (expected.drops is None)
    if found.drops is not None and expected.drops is not None:
        check_rows(found.drops, expected.drops, ("num_live", "num_dropped", "num_tokens"))


def check_rows(ours: ScoreRows | DropRows, theirs: ScoreRows | DropRows, names: tuple[str, ...]) -> None:
    for name in names:
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    assert isinstance(ours.live_table, DeviceTable)
    live = ours.live_table.live(theirs.live_table.shape[1]).numpy()
    for row, num_live in enumerate(theirs.num_live):
        num_blocks = -(-int(num_live) // BLOCK)
        np.testing.assert_array_equal(live[row, :num_blocks], theirs.live_table[row, :num_blocks])


def test_what_an_earlier_request_left_behind_is_not_taken_for_ones_own() -> None:
    """The new one has the same index, and its first decode token the offset that the old one waited for."""
    ring = RequestRing(2, BLOCK)
    one = np.array([1])
    ring.append(one, np.array([1]))  # the old one's next would be at offset 2
    ring.forget(one)  # the new one's prompt
    _, first = ring.append(one, np.array([2]))
    assert first.tolist() == [2]
    _, first = ring.append(one, np.array([3]))
    assert first.tolist() == [2]
    slots, _ = ring.take_pending(one, np.array([0]))
    assert slots.tolist() == [-1]


@pytest.mark.parametrize("gap", [0, 2])
def test_live_blocks_leave_the_gap_out(gap: int) -> None:
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    rows = DeviceTable(table, np.array([1]), np.array([gap]), pinned_blocks=np.array([1]))
    assert rows.live(4).tolist() == [[6, *range(7 + gap, 10 + gap)]] if gap < 2 else [[6, 9, 10, 11]]
