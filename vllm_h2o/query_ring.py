"""Which ring slot holds the pending decode queries of which request.

Nothing of a request is evicted between two fills of its tail block, so the attention of its last
``block_size`` queries can be scored together when the block fills. Until then each layer keeps those
queries in a ring slot ``[block_size, num_heads, head_size]``. This module only does the bookkeeping, once
per step for all layers.

A slot's key is the physical id of the tail block: it names exactly one request (only pinned, full blocks
are ever shared), and it survives reordered batches and skipped steps. Workers are not told when a request
ends, so slots of finished, aborted and preempted requests are reclaimed in two ways: when their block is
handed to another request, and, should slots run out, oldest use first.
"""

import heapq

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_NONE = -1


def num_ring_slots(max_num_seqs: int) -> int:
    """Slots for ``max_num_seqs`` live requests, and some for ended ones not yet noticed.

    Few are enough: vLLM hands out blocks freed last first, so a dead tail block is soon started anew.
    """
    return max_num_seqs + 16


class QueryRing:
    """Maps tail blocks to ring slots and tells which offsets of a slot are pending.

    Attributes:
        lost_queries: pending queries whose slot was reclaimed while their request still lived. It stays 0
            unless a request is skipped while more than ``num_slots - max_num_seqs`` others end.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.lost_queries = 0
        self._slot_of_block = np.full(1024, _NONE, dtype=np.int64)
        self._block_of_slot = np.full(num_slots, _NONE, dtype=np.int64)
        self._first = np.zeros(num_slots, dtype=np.int64)  # first pending offset of the slot
        self._next = np.zeros(num_slots, dtype=np.int64)  # offset that its next query will have
        self._last_use = np.zeros(num_slots, dtype=np.int64)
        # Lowest slot first: memory behind slots that were never needed is never touched.
        self._free = list(range(num_slots))
        self._flushed: list[int] = []  # slots read by the step under way, free from the next one on
        # Block id -> offset that its next query would have had, and how many were pending.
        self._reclaimed: dict[int, tuple[int, int]] = {}
        self._step = 0

    @property
    def num_used_slots(self) -> int:
        return self.num_slots - len(self._free)

    def start_step(self, started_blocks: IntArray) -> None:
        """Begin a step in which ``started_blocks`` get their first token: whatever they held has ended."""
        self._step += 1
        for slot in self._flushed:
            self._release(slot)
        self._flushed.clear()
        if started_blocks.size:
            self._reserve_blocks(int(started_blocks.max()))
            stale = self._slot_of_block[started_blocks]
            for slot in stale[stale != _NONE]:
                self._release(int(slot))
            if self._reclaimed:
                for block_id in started_blocks:
                    self._reclaimed.pop(int(block_id), None)

    def append(self, tail_blocks: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Place one new query per request, at ``offsets`` of its tail block.

        Returns:
            Ring slots and first pending offsets, both ``[num_rows]``. Where ``offsets`` is the last one of
            the block, the slot is the caller's for this step and free after it.
        """
        if not tail_blocks.size:
            return tail_blocks, offsets
        self._reserve_blocks(int(tail_blocks.max()))
        slots = self._slot_of_block[tail_blocks].copy()
        known = (slots != _NONE) & (self._next[slots] == offsets)
        self._last_use[slots[known]] = self._step
        for row in np.flatnonzero(~known):
            slots[row] = self._take(int(tail_blocks[row]), int(offsets[row]))
        self._next[slots] = offsets + 1
        self._flushed.extend(slots[offsets == self.block_size - 1].tolist())
        return slots, self._first[slots]

    def take_pending(self, tail_blocks: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Hand out what is pending before ``offsets`` of ``tail_blocks``, to be scored early.

        Returns:
            Ring slots (-1 where nothing is pending) and first pending offsets, both ``[num_rows]``.
        """
        if not tail_blocks.size:
            return tail_blocks, offsets
        self._reserve_blocks(int(tail_blocks.max()))
        if self._reclaimed:
            for block_id, offset in zip(tail_blocks.tolist(), offsets.tolist(), strict=True):
                self._count_lost(block_id, offset)
        slots = self._slot_of_block[tail_blocks]
        pending = (slots != _NONE) & (self._next[slots] == offsets)
        # The chunk about to fill these blocks would make a leftover of an earlier owner look like ours.
        for slot in slots[(slots != _NONE) & ~pending]:
            self._release(int(slot))
        self._flushed.extend(slots[pending].tolist())
        self._last_use[slots[pending]] = self._step
        return np.where(pending, slots, _NONE), self._first[slots]

    def _take(self, block_id: int, offset: int) -> int:
        self._count_lost(block_id, offset)
        slot = int(self._slot_of_block[block_id])
        if slot == _NONE:
            if not self._free:
                self._reclaim_oldest()
            slot = heapq.heappop(self._free)
            self._slot_of_block[block_id] = slot
            self._block_of_slot[slot] = block_id
        self._first[slot] = offset
        self._last_use[slot] = self._step
        return slot

    def _reclaim_oldest(self) -> None:
        slot = int(np.argmin(self._last_use))
        assert self._last_use[slot] < self._step, "more live rows in a step than ring slots"
        next_offset = int(self._next[slot])
        num_pending = next_offset - int(self._first[slot])
        self._reclaimed[int(self._block_of_slot[slot])] = next_offset, num_pending
        self._release(slot)

    def _count_lost(self, block_id: int, offset: int) -> None:
        """Note that the request of a reclaimed slot goes on, if it is still the same one."""
        next_offset, num_pending = self._reclaimed.pop(block_id, (_NONE, 0))
        if next_offset == offset:
            self.lost_queries += num_pending

    def _release(self, slot: int) -> None:
        self._slot_of_block[self._block_of_slot[slot]] = _NONE
        self._block_of_slot[slot] = _NONE
        heapq.heappush(self._free, slot)

    def _reserve_blocks(self, block_id: int) -> None:
        if block_id >= self._slot_of_block.size:
            grown = np.full(max(block_id + 1, 2 * self._slot_of_block.size), _NONE, dtype=np.int64)
            grown[: self._slot_of_block.size] = self._slot_of_block
            self._slot_of_block = grown
