"""What one step has to do beyond stock attention, worked out once on the host for all layers.

From each row's computed tokens ``c`` and new tokens ``q`` alone (``vllm_h2o.retention``) this module finds
the live blocks, the rows whose scores are due and the rows that lose blocks. It knows no vLLM.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_h2o import policies, retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.policies.base import AttentionPolicy
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.trace import TraceLog

IntArray = npt.NDArray[np.int64]
BlockTable = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""vLLM's block for padding; a row whose tail is here computes nothing real."""


def _nothing() -> IntArray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class ScoreRows:
    """Rows whose queries are scored in this step: ``[num_rows]`` int64 each unless said otherwise.

    Query ``i`` of a row sees its first ``num_live - num_queries + 1 + i`` live slots.

    Attributes:
        from_ring: bool; whether the queries are kept ones, or those of the batch.
        first_query: index of the first in the flattened ring, or in the batch; the others follow.
        num_queries: how many.
        num_live: live tokens that the last query sees.
        live_table: ``[num_rows, width]`` int32, live blocks in order, then stale ids that nobody may read.
        weights: ``[most queries]`` float32; a row's queries take the last ones of these.
        decay: float32, factor on what is stored.
    """

    from_ring: npt.NDArray[np.bool_]
    first_query: IntArray
    num_queries: IntArray
    num_live: IntArray
    live_table: BlockTable
    weights: npt.NDArray[np.float32]
    decay: npt.NDArray[np.float32]


@dataclass(frozen=True)
class DropRows:
    """Rows that lose blocks at the end of this step: ``[num_rows]`` int64 each.

    Attributes:
        num_live: live tokens before.
        num_dropped: tokens to drop, a multiple of the block size.
        live_table: as in ``ScoreRows``.
        num_tokens: all tokens so far, dropped ones too.
        total_weights: ``[max_model_len]`` float32, where a rank is a mean: entry ``n - 1`` is the weight of
            the ``n`` queries that saw a token, to divide its score by; else empty.
    """

    num_live: IntArray
    num_dropped: IntArray
    live_table: BlockTable
    num_tokens: IntArray
    total_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def kept_blocks(self, pinned_blocks: int, block_size: int) -> list[BlockTable]:
        """Per row the ids of the blocks that it goes on with, in order."""
        num_blocks = -(-self.num_live // block_size)
        freed_end = pinned_blocks + self.num_dropped // block_size
        return [
            np.delete(blocks[:count], np.s_[pinned_blocks:end])
            for blocks, count, end in zip(self.live_table, num_blocks, freed_end, strict=True)
        ]


@dataclass(frozen=True)
class StepPlan:
    """Work for every layer after its attention kernel, in this order; empty = nothing due.

    Attributes:
        append_tokens, append_slots: ``[m]`` int64, which queries of the batch go where in the ring
            flattened to ``[num_ring_slots * block_size]``.
        started_blocks: ``[n]`` int64, blocks that get their first token: their scores are reset.
        started_positions: ``[n, block_size]`` int32, positions of their tokens.
        scores: rows to score; a row may be in several of them, so they come one after the other.
        drops: rows that lose blocks.
        trace, trace_steps: where tracing is on, the log and which of its steps the rows of ``drops`` are.
    """

    append_tokens: IntArray = field(default_factory=_nothing)
    append_slots: IntArray = field(default_factory=_nothing)
    started_blocks: IntArray = field(default_factory=_nothing)
    started_positions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    scores: tuple[ScoreRows, ...] = ()
    drops: DropRows | None = None
    trace: TraceLog | None = None
    trace_steps: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not (self.append_tokens.size or self.started_blocks.size or self.scores or self.drops)


@dataclass(frozen=True)
class Batch:
    """The rows of a step as numbers; ``[num_rows]`` int64 each unless said otherwise.

    Attributes:
        computed: tokens computed before the step.
        new: tokens computed in it; 0 for padding.
        first_token: index of the row's first token in the batch.
        table: ``[num_rows, width]`` int32, logical block table.
        gap_blocks: blocks that are gone already.
        live_table: ``[num_rows, live_width]`` int32, the table with the gap left out. Entries past a row's
            live blocks are stale ids that nobody may read.
    """

    computed: IntArray
    new: IntArray
    first_token: IntArray
    table: BlockTable
    gap_blocks: IntArray
    live_table: BlockTable

    @property
    def total(self) -> IntArray:
        return self.computed + self.new

    @property
    def has_gap(self) -> bool:
        return bool(self.gap_blocks.any())

    def select(self, rows: npt.NDArray[np.bool_]) -> "Batch":
        return Batch(*(getattr(self, field)[rows] for field in self.__dataclass_fields__))


class StepPlanner:
    """Plans the steps of one KV cache group; its only state is the bookkeeping of pending queries."""

    def __init__(self, config: KVPolicyConfig, ring: QueryRing, trace: TraceLog | None) -> None:
        self.config = config
        policy = policies.create(config)
        self.policy = policy if isinstance(policy, AttentionPolicy) else None
        assert (self.policy is not None) == config.scores_attention
        self.total_weights = np.empty(0, dtype=np.float32)
        if self.policy is not None and config.rank_by == "mean":
            self.total_weights = self.policy.total_weights()
        self.ring = ring
        self.trace = trace

    def batch(self, seq_lens: IntArray, query_start: IntArray, table: BlockTable) -> Batch:
        """Find each row's live blocks.

        Args:
            seq_lens: ``[num_rows]``, tokens of each row with the new ones.
            query_start: ``[num_rows + 1]``, cumulative new tokens.
            table: ``[num_rows, width]``, logical block table.
        """
        bs, pinned = self.config.block_size, self.config.pinned_blocks
        new = np.diff(query_start)
        computed = seq_lens - new
        gap = self._evicted(computed)
        live_blocks = -(-seq_lens // bs) - gap
        columns = np.arange(max(int(live_blocks.max(initial=0)), 1))
        if gap.any():
            source = columns + np.where(columns >= pinned, gap[:, None], 0)
            live_table = np.take_along_axis(table, np.minimum(source, table.shape[1] - 1), axis=1)
        else:
            live_table = table[:, : columns.size]
        return Batch(computed, new, query_start[:-1], table, gap, live_table)

    def plan(self, batch: Batch) -> StepPlan:
        """Everything that the layers have to do in this step."""
        if not self.config.compacts:
            return StepPlan()
        bs = self.config.block_size
        rows = np.arange(batch.new.size)
        tail = np.minimum(batch.computed // bs, batch.table.shape[1] - 1)
        real = (batch.new > 0) & (batch.table[rows, tail] != NULL_BLOCK)
        if not real.all():
            batch = batch.select(real)
        if not batch.new.size:
            return StepPlan()
        started, positions = self._started_blocks(batch)
        append_tokens = append_slots = _nothing()
        scores: list[ScoreRows] = []
        if self.policy is not None:
            append_tokens, append_slots, scores = self._score(batch, started)
        dropped_blocks = self._evicted(batch.total) - batch.gap_blocks
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
        is_chunk = batch.new > 1
        scores: list[ScoreRows] = []
        if is_chunk.any():
            chunk_rows = batch.select(is_chunk)
            scores += [self._pending_before(chunk_rows), self._chunks(chunk_rows)]
        append_tokens = append_slots = _nothing()
        if not is_chunk.all():
            decode_rows = batch.select(~is_chunk) if is_chunk.any() else batch
            offsets = decode_rows.computed % bs
            slots, first = self.ring.append(_tails(decode_rows, bs), offsets)
            append_tokens, append_slots = decode_rows.first_token, slots * bs + offsets
            full = offsets == bs - 1
            if full.any():
                scores.append(self._kept(decode_rows.select(full), slots[full], first[full], bs, 1))
        return append_tokens, append_slots, scores

    def _evicted(self, num_tokens: IntArray) -> IntArray:
        return retention.evicted_blocks(
            num_tokens, budget_tokens=self.config.budget_tokens, block_size=self.config.block_size
        )

    def _started_blocks(self, batch: Batch) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """Ids of the blocks that get their first token, and the positions ``[n, bs]`` they will hold."""
        bs = self.config.block_size
        first = -(-batch.computed // bs)
        counts = -(-batch.total // bs) - first
        rows = np.repeat(np.arange(counts.size), counts)
        block_idx = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]
        positions = block_idx[:, None] * bs + np.arange(bs)
        return batch.table[rows, block_idx].astype(np.int64), positions.astype(np.int32)

    def _pending_before(self, batch: Batch) -> ScoreRows:
        """Decode queries that a chunk row still owes, to be scored before the chunk (rare)."""
        bs = self.config.block_size
        inside = batch.select(batch.computed % bs != 0)
        offsets = inside.computed % bs
        slots, first = self.ring.take_pending(_tails(inside, bs), offsets)
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
            total_weights=self.total_weights,
        )


def _tails(batch: Batch, block_size: int) -> IntArray:
    """Ids of the blocks that the rows' next tokens go to."""
    return batch.table[np.arange(batch.new.size), batch.computed // block_size].astype(np.int64)
