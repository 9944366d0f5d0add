"""Kept decode queries where the runner numbers its requests: one ring slot for each.

vLLM's V2 model runner gives each running request an index below ``max_num_seqs`` and tells the metadata
builder (``CommonAttentionMetadata.req_idx``). An index is reused once its request ended; what that one left
behind is recognised because a new request begins with a chunk, or at position 0.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
_NONE = -1


class RequestRing:
    """As ``vllm_h2o.query_ring.QueryRing``, with request indices for keys, which are the ring slots.

    Attributes:
        lost_queries: always 0: a slot is its request's own.
    """

    def __init__(self, num_requests: int, block_size: int) -> None:
        self.num_slots = num_requests
        self.block_size = block_size
        self.lost_queries = 0
        self._first = np.zeros(num_requests, dtype=np.int64)
        self._next = np.full(num_requests, _NONE, dtype=np.int64)

    def start_step(self, started_blocks: IntArray) -> None:
        """Nothing to notice: blocks aren't keys here."""

    def append(self, requests: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Place one new query per request at ``offsets`` of its slot.

        Returns:
            Ring slots and first pending offsets, both ``[num_rows]``.
        """
        fresh = self._next[requests] != offsets
        self._first[requests[fresh]] = offsets[fresh]
        first = self._first[requests]
        self._next[requests] = np.where(offsets == self.block_size - 1, _NONE, offsets + 1)
        return requests, first

    def take_pending(self, requests: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Hand out what is pending before ``offsets``: ring slots (-1 where nothing is) and first offsets."""
        pending = self._next[requests] == offsets
        self.forget(requests)
        return np.where(pending, requests, _NONE), self._first[requests]

    def forget(self, requests: IntArray) -> None:
        """Nothing of these is pending any more, or what is was an earlier owner's."""
        self._next[requests] = _NONE
