"""Works out, once on the host for all layers, what one step has to do beyond stock attention.

From each row's computed tokens ``c`` and new tokens ``q`` alone (``vllm_h2o.retention``) this module finds
the live blocks, the rows whose scores are due and the rows that lose blocks. It knows no vLLM.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_h2o import policies, retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.policies.base import AttentionPolicy
from vllm_h2o.request_limits import RequestLimits, RowLimits
from vllm_h2o.step_plan import (
    NULL_BLOCK,
    Batch,
    BlockTable,
    DropRows,
    IntArray,
    ScoreRows,
    StepPlan,
    nothing,
)
from vllm_h2o.trace import TraceLog


class Ring(Protocol):
    """Where decode queries wait until their block is full; ``vllm_h2o.query_ring`` says more."""

    lost_queries: int

    def start_step(self, started_blocks: IntArray) -> None: ...
    def append(self, keys: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]: ...
    def take_pending(self, keys: IntArray, offsets: IntArray) -> tuple[IntArray, IntArray]: ...


class StepPlanner:
    """Plans the steps of one KV cache group; its only state is the bookkeeping of pending queries."""

    def __init__(self, config: KVPolicyConfig, ring: Ring, trace: TraceLog | None) -> None:
        self.config = config
        policy = policies.create(config)
        self.policy = policy if isinstance(policy, AttentionPolicy) else None
        assert (self.policy is not None) == config.scores_attention
        self.total_weights = np.empty(0, dtype=np.float32)
        if self.policy is not None and config.rank_by == "mean":
            self.total_weights = self.policy.total_weights()
        self._own_limits = RequestLimits.of_policy(config)
        self.ring = ring
        self.trace = trace

    def batch(
        self,
        seq_lens: IntArray,
        query_start: IntArray,
        table: BlockTable,
        limits: RowLimits | None = None,
    ) -> Batch:
        """Find each row's live blocks.

        Args:
            seq_lens: ``[num_rows]``, tokens of each row with the new ones.
            query_start: ``[num_rows + 1]``, cumulative new tokens.
            table: ``[num_rows, width]``, logical block table.
            limits: of the rows' requests; None where all have the policy's own.
        """
        bs = self.config.block_size
        new = np.diff(query_start)
        computed = seq_lens - new
        rows = self._limits(limits, new.size)
        gap, pinned = self._evicted(computed, rows), rows.pinned_blocks
        live_blocks = -(-seq_lens // bs) - gap
        columns = np.arange(max(int(live_blocks.max(initial=0)), 1))
        if gap.any():
            source = columns + np.where(columns >= pinned[:, None], gap[:, None], 0)
            live_table = np.take_along_axis(table, np.minimum(source, table.shape[1] - 1), axis=1)
        else:
            live_table = table[:, : columns.size]
        return Batch(
            computed, new, query_start[:-1], table, gap, live_table, self._evicted(seq_lens, rows), pinned,
            rows.budget_tokens < self.config.no_budget_tokens,
        )  # fmt: skip

    def _limits(self, limits: RowLimits | None, num_rows: int) -> RowLimits:
        """Of all rows; those behind the requests are padding."""
        if limits is None:
            return RowLimits.alike(num_rows, self._own_limits)
        return limits.padded(num_rows, self._own_limits)

    def plan(self, batch: Batch) -> StepPlan:
        """Everything that the layers have to do in this step."""
        if not self.config.compacts:
            return StepPlan()
        real = self._is_real(batch)
        if not real.all():
            batch = batch.select(real)
        if not batch.new.size:
            return StepPlan()
        # Of requests that lose nothing as well: their pinned blocks may be shared with others.
        started, positions = self._started_blocks(batch)
        if not batch.evicts.all():
            batch = batch.select(batch.evicts)
        append_tokens = append_slots = nothing()
        scores: list[ScoreRows] = []
        if self.policy is not None:
            append_tokens, append_slots, scores = self._score(batch, started)
        dropped_blocks = batch.gap_blocks_after - batch.gap_blocks
        trace_steps: tuple[int, ...] = ()
        if self.trace is not None:
            first_step = self.trace.add_steps(batch.table[:, 0], batch.computed, batch.new)
            trace_steps = tuple((np.flatnonzero(dropped_blocks) + first_step).tolist())
        return StepPlan(
            append_tokens=append_tokens,
            append_slots=append_slots,
            started_blocks=started,
            started_positions=positions,
            scores=tuple(rows for rows in scores if rows.num_live.size),
            drops=self._drops(batch, dropped_blocks) if dropped_blocks.any() else None,
            trace=self.trace,
            trace_steps=trace_steps,
        )

    def _score(self, batch: Batch, started: IntArray) -> tuple[IntArray, IntArray, list[ScoreRows]]:
        """Which queries of the batch are kept where in the ring, and which rows are scored."""
        bs = self.config.block_size
        self.ring.start_step(started)
        # A last token of a prompt may come alone, and what is cut behind it has to have its score first.
        cuts = batch.gap_blocks_after > batch.gap_blocks
        is_chunk = (batch.new > 1) | (cuts & (batch.computed % bs != bs - 1))
        scores: list[ScoreRows] = []
        if is_chunk.any():
            chunk_rows = batch.select(is_chunk)
            scores += [self._pending_before(chunk_rows), self._chunks(chunk_rows)]
        append_tokens = append_slots = nothing()
        if not is_chunk.all():
            decode_rows = batch.select(~is_chunk) if is_chunk.any() else batch
            offsets = decode_rows.computed % bs
            slots, first = self.ring.append(self._ring_keys(decode_rows), offsets)
            append_tokens, append_slots = decode_rows.first_token, slots * bs + offsets
            full = offsets == bs - 1
            if full.any():
                scores.append(self._kept(decode_rows.select(full), slots[full], first[full], bs, 1))
        return append_tokens, append_slots, scores

    def _evicted(self, num_tokens: IntArray, rows: RowLimits) -> IntArray:
        return retention.evicted_blocks(
            num_tokens, budget_tokens=rows.budget_at(num_tokens), block_size=self.config.block_size
        )

    def _started_blocks(self, batch: Batch) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Ids of the blocks that get their first token, and the positions ``[n, bs]`` they will hold."""
        bs = self.config.block_size
        first = -(-batch.computed // bs)
        counts = -(-batch.total // bs) - first
        rows = np.repeat(np.arange(counts.size), counts)
        block_idx = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]
        positions = block_idx[:, None] * bs + np.arange(bs)
        return self._block_ids(batch, rows, block_idx), positions.astype(np.int32)

    def _pending_before(self, batch: Batch) -> ScoreRows:
        """Decode queries that a chunk row still owes, to be scored before the chunk (rare)."""
        bs = self.config.block_size
        inside = batch.select(batch.computed % bs != 0)
        offsets = inside.computed % bs
        slots, first = self.ring.take_pending(self._ring_keys(inside), offsets)
        pending = slots >= 0
        return self._kept(inside.select(pending), slots[pending], first[pending], offsets[pending], 0)

    def _kept(
        self, batch: Batch, slots: IntArray, first: IntArray, stop: IntArray | int, new: int
    ) -> ScoreRows:
        """Kept queries at offsets ``[first, stop)`` of ring slots; the last is ``new`` tokens ahead."""
        bs = self.config.block_size
        live = batch.computed + new - batch.gap_blocks * bs
        return self._score_rows(True, slots * bs + first, stop - first, live, batch.live_table)

    def _chunks(self, batch: Batch) -> ScoreRows:
        live = batch.total - batch.gap_blocks * self.config.block_size
        return self._score_rows(False, batch.first_token, batch.new, live, batch.live_table)

    def _score_rows(
        self, from_ring: bool, first: IntArray, flushed: IntArray, live: IntArray, live_table: BlockTable
    ) -> ScoreRows:
        assert self.policy is not None
        count = self.policy.num_scored(flushed)
        return ScoreRows(
            from_ring=np.full(live.size, from_ring),
            first_query=first + flushed - count,
            num_queries=count,
            num_live=live,
            live_table=live_table,
            weights=self.policy.query_weights(np.arange(int(count.max(initial=0)) - 1, -1, -1)),
            decay=self.policy.decay(flushed),
        )

    def _drops(self, batch: Batch, dropped_blocks: IntArray) -> DropRows:
        bs = self.config.block_size
        due = dropped_blocks > 0
        rows = batch.select(due)
        return DropRows(
            num_live=rows.total - rows.gap_blocks * bs,
            num_dropped=dropped_blocks[due] * bs,
            live_table=rows.live_table,
            num_tokens=rows.total,
            pinned_tokens=rows.pinned_blocks * bs,
            total_weights=self.total_weights,
        )

    def _is_real(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """Rows that compute something: not padding, whose tokens go to the null block."""
        tail = np.minimum(batch.computed // self.config.block_size, batch.table.shape[1] - 1)
        real: npt.NDArray[np.bool_] = batch.new > 0
        return real & (batch.table[np.arange(tail.size), tail] != NULL_BLOCK)

    def _ring_keys(self, batch: Batch) -> IntArray:
        """Ids of the blocks that the rows' next tokens go to."""
        return self._block_ids(batch, np.arange(batch.new.size), batch.computed // self.config.block_size)

    def _block_ids(self, batch: Batch, rows: IntArray, block_idx: IntArray) -> IntArray:
        return batch.table[rows, block_idx].astype(np.int64)
