"""The rule, against requests whose tokens are counted one by one."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h2o.retention import evicted_blocks, live_tokens, max_blocks_held

BLOCK_SIZES = st.sampled_from([1, 2, 3, 8, 16, 32])
STEPS = st.lists(st.one_of(st.just(1), st.integers(1, 40)), min_size=1, max_size=60)


class CountedRequest:
    """Holds `(block_idx, position)` of every live token, and drops whole blocks while it is over budget."""

    def __init__(self, budget_tokens: int, block_size: int, pinned_blocks: int) -> None:
        self.budget_tokens, self.block_size, self.pinned_blocks = budget_tokens, block_size, pinned_blocks
        self.live: list[tuple[int, int]] = []
        self.computed = 0
        self.dropped_blocks: list[int] = []

    def compute(self, num_tokens: int) -> None:
        for position in range(self.computed, self.computed + num_tokens):
            self.live.append((position // self.block_size, position))
        self.computed += num_tokens

    def evict(self) -> None:
        """What the rule sums up: a request that reached its budget drops blocks until it is below it."""
        while len(self.live) >= self.budget_tokens:
            oldest = min(block_idx for block_idx, _ in self.live if block_idx >= self.pinned_blocks)
            self.live = [token for token in self.live if token[0] != oldest]
            self.dropped_blocks.append(oldest)


@settings(max_examples=100)
@given(block_size=BLOCK_SIZES, budget_blocks=st.integers(1, 9), pinned=st.integers(0, 8), steps=STEPS)
def test_rule_equals_counting_tokens(
    block_size: int, budget_blocks: int, pinned: int, steps: list[int]
) -> None:
    budget = budget_blocks * block_size
    pinned = min(pinned, budget_blocks - 1)
    request = CountedRequest(budget, block_size, pinned)
    for new in steps:
        before = request.computed
        gone = evicted_blocks(before, budget_tokens=budget, block_size=block_size)
        # Start of the step: the gap is exactly what was dropped so far, right behind the pinned blocks.
        assert request.dropped_blocks == list(range(pinned, pinned + gone))
        request.compute(new)
        assert len(request.live) == request.computed - gone * block_size
        assert len(request.live) <= budget - 1 + new
        request.evict()
        gone = evicted_blocks(request.computed, budget_tokens=budget, block_size=block_size)
        assert len(request.dropped_blocks) == gone
        live = live_tokens(request.computed, budget_tokens=budget, block_size=block_size)
        assert live == len(request.live)
        if request.computed >= budget:
            assert budget - block_size <= live < budget
        else:
            assert live == request.computed
        assert len({block_idx for block_idx, _ in request.live}) <= budget_blocks


@pytest.mark.parametrize(
    ("computed", "blocks"), [(0, 0), (95, 0), (96, 1), (127, 1), (128, 2), (159, 2), (160, 3)]
)
def test_counts_by_hand(computed: int, blocks: int) -> None:
    assert evicted_blocks(computed, budget_tokens=96, block_size=32) == blocks


@given(block_size=BLOCK_SIZES, budget_blocks=st.integers(1, 9), computed=st.integers(0, 5000))
def test_decode_evicts_exactly_when_the_tail_block_fills(
    block_size: int, budget_blocks: int, computed: int
) -> None:
    rule = {"budget_tokens": budget_blocks * block_size, "block_size": block_size}
    grown = evicted_blocks(computed + 1, **rule) - evicted_blocks(computed, **rule)
    full = (computed + 1) % block_size == 0 and computed + 1 >= budget_blocks * block_size
    assert grown == int(full)


@given(
    block_size=BLOCK_SIZES,
    budget_blocks=st.integers(1, 9),
    computed=st.lists(st.integers(0, 10**9), min_size=0, max_size=20),
)
def test_numpy_arrays_give_what_ints_give(block_size: int, budget_blocks: int, computed: list[int]) -> None:
    rule = {"budget_tokens": budget_blocks * block_size, "block_size": block_size}
    array = np.array(computed, dtype=np.int64)
    for function in (evicted_blocks, live_tokens):
        got = function(array, **rule)
        assert isinstance(got, np.ndarray)
        assert got.dtype == np.int64
        assert got.tolist() == [function(c, **rule) for c in computed]
    assert array.tolist() == computed


@st.composite
def in_flight_cases(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[int, int]]]:
    block_size = draw(BLOCK_SIZES)
    budget = block_size * draw(st.integers(1, 6))
    max_in_flight = draw(st.integers(1, 70))
    max_model_len = draw(st.one_of(st.integers(1, 60), st.just(10_000)))
    # New tokens wanted by a step, and how many earlier steps are settled before it is scheduled.
    steps = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=40))
    return block_size, budget, max_in_flight, max_model_len, steps


@settings(max_examples=200)
@given(in_flight_cases())
def test_max_blocks_held_bounds_a_scheduler_that_frees_late(
    case: tuple[int, int, int, int, list[tuple[int, int]]],
) -> None:
    """Blocks are freed by settled tokens only, and up to `max_in_flight_tokens` are not settled."""
    block_size, budget, max_in_flight, max_model_len, steps = case
    bound = max_blocks_held(
        budget_tokens=budget,
        block_size=block_size,
        max_in_flight_tokens=max_in_flight,
        max_model_len=max_model_len,
    )
    in_flight: deque[int] = deque()
    settled = 0
    for wanted, num_settled in steps:
        for _ in range(min(num_settled, len(in_flight))):
            settled += in_flight.popleft()
        scheduled = settled + sum(in_flight)
        new = min(wanted, max_in_flight - sum(in_flight), max_model_len - scheduled)
        if new <= 0:
            continue
        in_flight.append(new)
        freed = evicted_blocks(settled, budget_tokens=budget, block_size=block_size)
        allocated = len(range(0, scheduled + new, block_size))
        assert allocated - freed <= bound


@pytest.mark.parametrize("block_size", [1, 2, 16, 32])
def test_max_blocks_held_is_not_generous(block_size: int) -> None:
    """Each block too many is one that the scheduler keeps back for every request it admits."""
    for budget_blocks in (1, 3):
        for in_flight in range(1, 3 * block_size + 2):
            budget = budget_blocks * block_size
            rule = {"budget_tokens": budget, "block_size": block_size}
            worst = max(
                -(-(settled + in_flight) // block_size) - evicted_blocks(settled, **rule)
                for settled in range(budget + 2 * block_size)
            )
            bound = max_blocks_held(**rule, max_in_flight_tokens=in_flight, max_model_len=10_000)
            assert worst <= bound <= worst + 2
            short = max_blocks_held(**rule, max_in_flight_tokens=in_flight, max_model_len=budget)
            assert budget_blocks <= short <= budget_blocks + 1
