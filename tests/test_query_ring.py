"""The ring's bookkeeping, against requests that remember their own pending queries.

Requests start, decode, take chunks, pause and end without notice; blocks are reused in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_h2o.query_ring import QueryRing, num_ring_slots

BLOCK = 4


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@dataclass
class Request:
    """A request's blocks, and the positions of its decode queries that aren't scored yet."""

    number: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    pending: list[int] = field(default_factory=list)

    @property
    def offset(self) -> int:
        return self.computed % BLOCK

    @property
    def tail(self) -> int:
        return self.blocks[self.computed // BLOCK]


@dataclass
class Slot:
    """What the ring must know of a slot: whose block it serves, and when that was last seen."""

    block: int
    last_use: int


class RingMachine(RuleBasedStateMachine):
    """Keeps, beside the ring, the queries themselves: `memory[slot][offset]` is what a layer would hold."""

    @initialize(num_slots=st.integers(2, 6), seed=st.integers(0, 2**16))
    def set_up(self, num_slots: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.ring = QueryRing(num_slots, BLOCK)
        self.num_slots = num_slots
        self.live: list[Request] = []
        self.num_requests = self.step = self.lost = 0
        # Ids past the ring's initial table too; taken from either end.
        self.free_blocks = [*range(1, 14), 5000, 5001]
        self.random.shuffle(self.free_blocks)
        self.memory: dict[int, dict[int, tuple[int, int]]] = {slot: {} for slot in range(num_slots)}
        self.slots: dict[int, Slot] = {}  # used slots
        self.scored: list[int] = []  # slots that the last step handed out
        self.reclaimed: dict[int, int] = {}  # block -> queries lost with it

    # --- what happens to requests -----------------------------------------------------------------

    @rule(data=st.data())
    def run_step(self, data: st.DataObject) -> None:
        """A scheduler step: some live and some new requests, each with some new tokens."""
        rows = [request for request in self.live if data.draw(st.booleans(), label="scheduled")]
        rows = rows[: self.num_slots]
        for _ in range(data.draw(st.integers(0, 2), label="new requests")):
            if len(rows) < self.num_slots and self.free_blocks:
                rows.append(Request(self.num_requests))
                self.num_requests += 1
        new = [data.draw(st.sampled_from([1, 1, 1, 2, 3, 5, 9]), label="new tokens") for _ in rows]
        self._schedule(rows, new)

    @rule(count=st.integers(1, 9))
    def decode_all(self, count: int) -> None:
        """Everyone decodes for a while: this is what fills blocks."""
        for _ in range(count):
            rows = self.live[: self.num_slots]
            self._schedule(rows, [1] * len(rows))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finished, aborted or preempted: the ring isn't told, the blocks are free."""
        for request in list(self.live):
            if data.draw(st.booleans(), label="ends"):
                self.live.remove(request)
                self.free_blocks.extend(request.blocks)
        self.random.shuffle(self.free_blocks)

    # --- one step, as vllm_h2o.step_plan does it --------------------------------------------------

    def _schedule(self, rows: list[Request], new: list[int]) -> None:
        chosen, started = [], []
        for request, count in zip(rows, new, strict=True):
            missing = -(-(request.computed + count) // BLOCK) - len(request.blocks)
            if missing > len(self.free_blocks):
                continue  # no blocks left: skipped
            if request not in self.live:
                self.live.append(request)
            for _ in range(missing):
                started.append(self.free_blocks.pop(self.random.choice([0, -1])))
                request.blocks.append(started[-1])
            chosen.append((request, count))
        self.random.shuffle(chosen)  # batch order means nothing
        self.random.shuffle(started)
        self._start(started)
        self._chunks([(request, count) for request, count in chosen if count > 1])
        self._decodes([request for request, count in chosen if count == 1])

    def _start(self, started: list[int]) -> None:
        self.step += 1
        self.ring.start_step(ints(started))
        for slot in self.scored:
            del self.slots[slot]
        self.scored = []
        self._forget(started)

    def _chunks(self, rows: list[tuple[Request, int]]) -> None:
        inside = [(request, count) for request, count in rows if request.offset]
        tails, offsets = [r.tail for r, _ in inside], [r.offset for r, _ in inside]
        slots, first = self.ring.take_pending(ints(tails), ints(offsets))
        assert len(slots) == len(first) == len(inside)
        for (request, _), slot, begin in zip(inside, slots.tolist(), first.tolist(), strict=True):
            self.lost += self.reclaimed.pop(request.tail, 0)
            if request.pending:
                self._check_handed_out(request, slot, begin, request.offset)
            else:
                assert slot == -1
                self._forget([request.tail])
        for request, count in rows:
            request.computed += count

    def _decodes(self, rows: list[Request]) -> None:
        tails, offsets = [request.tail for request in rows], [request.offset for request in rows]
        taken = set(self.slots)
        slots, first = self.ring.append(ints(tails), ints(offsets))
        assert len(slots) == len(first) == len(set(slots.tolist())) == len(rows)
        for request, slot in zip(rows, slots.tolist(), strict=True):
            # Those who keep their slot have used it before anyone needs a new one.
            if slot in self.slots and self.slots[slot].block == request.tail:
                self.slots[slot].last_use = self.step
        for request, slot in zip(rows, slots.tolist(), strict=True):
            if slot not in self.slots or self.slots[slot].block != request.tail:
                self._check_reclaimed(slot, taken)
                self.lost += self.reclaimed.pop(request.tail, 0)
                self.slots[slot] = Slot(request.tail, self.step)
                taken.add(slot)
        for request, slot, begin in zip(rows, slots.tolist(), first.tolist(), strict=True):
            self.memory[slot][request.offset] = request.number, request.computed
            request.pending.append(request.computed)
            request.computed += 1
            if request.offset == 0:
                self._check_handed_out(request, slot, begin, BLOCK)
            else:
                assert begin == request.pending[0] % BLOCK

    # --- the model --------------------------------------------------------------------------------

    def _check_handed_out(self, request: Request, slot: int, begin: int, end: int) -> None:
        held = [self.memory[slot][offset] for offset in range(begin, end)]
        assert held == [(request.number, position) for position in request.pending]
        request.pending = []
        self.slots[slot].last_use = self.step
        self.scored.append(slot)

    def _check_reclaimed(self, slot: int, taken: set[int]) -> None:
        """A slot that was in use may go to another block only if none is free, longest unused first."""
        if slot not in self.slots:
            return
        assert len(taken) == self.num_slots
        assert self.slots[slot].last_use < self.step
        assert self.slots[slot].last_use == min(s.last_use for s in self.slots.values())
        block = self.slots[slot].block
        for request in self.live:
            if request.pending and request.blocks[request.pending[0] // BLOCK] == block:
                self.reclaimed[block] = len(request.pending)
                request.pending = []

    def _forget(self, blocks: list[int]) -> None:
        self.slots = {slot: used for slot, used in self.slots.items() if used.block not in blocks}
        for block in blocks:
            self.reclaimed.pop(block, None)

    @invariant()
    def queries_survive(self) -> None:
        """Every live request's pending queries are in a slot of its own, untouched."""
        if not hasattr(self, "ring"):
            return
        assert self.ring.num_used_slots == len(self.slots)
        by_block = {used.block: slot for slot, used in self.slots.items()}
        for request in self.live:
            if request.pending:
                memory = self.memory[by_block[request.blocks[request.pending[0] // BLOCK]]]
                for position in request.pending:
                    assert memory[position % BLOCK] == (request.number, position)

    @invariant()
    def losses_are_counted(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.lost_queries == self.lost


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=120, stateful_step_count=30)


def decode(ring: QueryRing, block: int, offset: int) -> tuple[int, int]:
    ring.start_step(ints([block] if offset == 0 else []))
    slots, first = ring.append(ints([block]), ints([offset]))
    return int(slots[0]), int(first[0])


def test_nothing_is_lost_while_there_are_slots() -> None:
    """A request may pause for as long as it likes, if those that end meanwhile find slots."""
    ring = QueryRing(num_slots=4, block_size=BLOCK)
    slot, _ = decode(ring, 10, 0)
    for block in (11, 12, 13):
        decode(ring, block, 0)  # starts, and ends unnoticed
    for _ in range(50):
        decode(ring, 12, 0)  # its block goes to new requests
    assert decode(ring, 10, 1) == (slot, 0)
    assert ring.lost_queries == 0
    assert ring.num_used_slots == 4


@pytest.mark.parametrize("first_offset", [0, 1, 2])
@pytest.mark.parametrize("by_chunk", [False, True])
def test_losses_are_the_queries_that_were_pending(first_offset: int, by_chunk: bool) -> None:
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    for offset in range(first_offset, 3):
        decode(ring, 10, offset)
    for block in (11, 12):
        decode(ring, block, 0)
    assert ring.lost_queries == 0  # block 10's request may have ended, nobody knows
    if by_chunk:
        ring.start_step(ints([]))
        slots, _ = ring.take_pending(ints([10]), ints([3]))
        assert slots.tolist() == [-1]
    else:
        assert decode(ring, 10, 3)[1] == 3
    assert ring.lost_queries == 3 - first_offset


def test_an_ended_request_loses_nothing() -> None:
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    for block in (10, 11, 12, 10, 11, 12):
        decode(ring, block, 0)
    assert ring.lost_queries == 0


def test_block_ids_of_any_size() -> None:
    """The table of blocks grows, and forgets nothing then."""
    ring = QueryRing(num_slots=4, block_size=BLOCK)
    held = {block: decode(ring, block, 0)[0] for block in (10, 3000, 100_000)}
    assert {block: decode(ring, block, 1) for block in held} == {b: (s, 0) for b, s in held.items()}


def test_a_block_that_starts_anew_has_lost_nothing() -> None:
    """Its next owner may reach the offset where the reclaimed queries would have gone on."""
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    for block, offset in ((10, 0), (10, 1), (11, 0), (12, 0)):
        decode(ring, block, offset)
    ring.start_step(ints([10]))  # by a chunk of two tokens
    assert decode(ring, 10, 2)[1] == 2
    assert ring.lost_queries == 0


def test_queries_that_do_not_follow_are_not_joined() -> None:
    """Whatever made a token of the block pass the ring by, earlier queries are of no use any more."""
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    decode(ring, 10, 0)
    assert decode(ring, 10, 2)[1] == 2
    decode(ring, 11, 0)
    ring.start_step(ints([]))
    slots, _ = ring.take_pending(ints([11]), ints([2]))
    assert slots.tolist() == [-1]
    # The chunk ends where the leftover would have gone on.
    assert decode(ring, 11, 1)[1] == 1


def test_low_slots_are_used_first() -> None:
    """Memory behind slots that were never needed is never touched."""
    ring = QueryRing(num_slots=100, block_size=BLOCK)
    blocks = ints([10, 11, 12])
    for _ in range(20):
        for offset in range(BLOCK):
            ring.start_step(blocks if offset == 0 else blocks[:0])
            slots, _ = ring.append(blocks, np.full(3, offset))
            assert set(slots.tolist()) == {0, 1, 2}


def test_more_rows_than_slots_is_our_bug() -> None:
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    ring.start_step(ints([10, 11, 12]))
    with pytest.raises(AssertionError, match="more live rows"):
        ring.append(ints([10, 11, 12]), ints([0, 0, 0]))


@pytest.mark.parametrize("num_seqs", [1, 16, 256])
def test_slots_cover_all_requests_and_some_ended_ones(num_seqs: int) -> None:
    assert num_ring_slots(num_seqs) > num_seqs


def test_empty_steps() -> None:
    ring = QueryRing(num_slots=2, block_size=BLOCK)
    slot, _ = decode(ring, 10, 0)
    ring.start_step(ints([]))
    for call in (ring.append, ring.take_pending):
        slots, first = call(ints([]), ints([]))
        assert slots.size == first.size == 0
    assert decode(ring, 10, 1) == (slot, 0)
