"""What one step has to do beyond stock attention, worked out once on the host for all layers.

From each row's computed tokens ``c`` and new tokens ``q`` alone (``vllm_h2o.retention``) this module finds
the live blocks, the rows whose scores are due and the rows that lose blocks. It knows no vLLM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o import policies, retention
from vllm_h2o.compaction import Compaction
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.scoring import DecodeFlush, PrefillChunk
from vllm_h2o.trace import TraceLog

IntArray = npt.NDArray[np.int64]
BlockTable = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""vLLM's block for padding; a row whose tail is here computes nothing real."""

MAX_FLUSH_SLOTS = 4096
"""Slots (rows times the longest row) scored in one batch: its logits then stay in the CPU's cache."""


@dataclass(frozen=True)
class StepPlan:
    """Work for every layer after its attention kernel, in this order; None or empty = nothing due.

    Attributes:
        started_blocks: ``[n]`` int64, blocks that get their first token.
        started_positions: ``[n, block_size]`` int32, positions of their tokens.
        append_tokens, append_slots: ``[m]`` int64, which queries of the batch go where in the ring
            flattened to ``[num_ring_slots * block_size]``.
        trace, trace_steps: where tracing is on, the log and which of its steps the compaction's rows are.
    """

    started_blocks: torch.Tensor | None = None
    started_positions: torch.Tensor | None = None
    append_tokens: torch.Tensor | None = None
    append_slots: torch.Tensor | None = None
    flushes: tuple[DecodeFlush, ...] = ()
    chunks: tuple[PrefillChunk, ...] = ()
    compaction: Compaction | None = None
    trace: TraceLog | None = None
    trace_steps: tuple[int, ...] = ()


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

    def __init__(
        self, config: KVPolicyConfig, ring: QueryRing, device: torch.device, trace: TraceLog | None
    ) -> None:
        self.config = config
        self.policy = policies.create(config)
        self.ring = ring
        self.device = device
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
        bs = self.config.block_size
        rows = np.arange(batch.new.size)
        tail = np.minimum(batch.computed // bs, batch.table.shape[1] - 1)
        real = (batch.new > 0) & (batch.table[rows, tail] != NULL_BLOCK)
        if not real.all():
            batch = batch.select(real)
        if not batch.new.size:
            return StepPlan()
        started, positions = self._started_blocks(batch)
        self.ring.start_step(started)
        flushes: list[_FlushRows] = []
        is_chunk = batch.new > 1
        chunks: tuple[PrefillChunk, ...] = ()
        if is_chunk.any():
            chunk_rows = batch.select(is_chunk)
            flushes.append(self._pending_before(chunk_rows))
            chunks = tuple(self._chunks(chunk_rows))
        append_tokens = append_slots = None
        if not is_chunk.all():
            decode_rows = batch.select(~is_chunk)
            offsets = decode_rows.computed % bs
            slots, first = self.ring.append(_tails(decode_rows, bs), offsets)
            append_tokens = self._tensor(decode_rows.first_token)
            append_slots = self._tensor(slots * bs + offsets)
            full = offsets == bs - 1
            flushes.append(_FlushRows.of(decode_rows.select(full), slots[full], first[full], bs, bs, 1))
        dropped_blocks = self._evicted(batch.total) - batch.gap_blocks
        trace_steps: tuple[int, ...] = ()
        if self.trace is not None:
            first_step = self.trace.add_steps(batch.table[:, 0], batch.computed, batch.new)
            trace_steps = tuple((np.flatnonzero(dropped_blocks) + first_step).tolist())
        return StepPlan(
            started_blocks=self._tensor(started) if started.size else None,
            started_positions=self._tensor(positions) if started.size else None,
            append_tokens=append_tokens,
            append_slots=append_slots,
            flushes=tuple(flush for rows_ in flushes for flush in self._flushes(rows_)),
            chunks=chunks,
            compaction=self._compaction(batch, dropped_blocks) if dropped_blocks.any() else None,
            trace=self.trace,
            trace_steps=trace_steps,
        )

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

    def _pending_before(self, batch: Batch) -> "_FlushRows":
        """Decode queries that a chunk row still owes, to be scored before the chunk (rare)."""
        bs = self.config.block_size
        inside = batch.select(batch.computed % bs != 0)
        offsets = inside.computed % bs
        slots, first = self.ring.take_pending(_tails(inside, bs), offsets)
        pending = slots >= 0
        return _FlushRows.of(inside.select(pending), slots[pending], first[pending], offsets[pending], bs, 0)

    def _chunks(self, batch: Batch) -> Iterator[PrefillChunk]:
        bs = self.config.block_size
        live = batch.total - batch.gap_blocks * bs
        for row in range(live.size):
            num_queries = int(batch.new[row])
            num_blocks = -(-int(live[row]) // bs)
            yield PrefillChunk(
                first_token=int(batch.first_token[row]),
                num_queries=num_queries,
                num_live=int(live[row]),
                blocks=self._tensor(batch.live_table[row, :num_blocks].astype(np.int64)),
                pinned_blocks=min(self.config.pinned_blocks, num_blocks),
                weights=self._tensor(self.policy.query_weights(np.arange(num_queries)[::-1])),
                decay=float(self.policy.decay(np.array(num_queries))),
            )

    def _flushes(self, rows: "_FlushRows") -> Iterator[DecodeFlush]:
        """Batches of at most ``MAX_FLUSH_SLOTS``, rows of like length together."""
        order = np.argsort(-rows.live, kind="stable")
        begin = 0
        while begin < order.size:
            longest = int(rows.live[order[begin]])
            count = max(1, MAX_FLUSH_SLOTS // longest)
            yield self._flush(rows.select(order[begin : begin + count]))
            begin += count

    def _flush(self, rows: "_FlushRows") -> DecodeFlush:
        bs = self.config.block_size
        num_blocks = -(-rows.live // bs)
        columns = np.arange(int(num_blocks.max()))
        has_block = columns < num_blocks[:, None]
        blocks = np.where(has_block, rows.live_table[:, : columns.size], NULL_BLOCK).astype(np.int64)
        offsets = np.arange(bs)
        ages = rows.stop[:, None] - 1 - offsets
        pending = (offsets >= rows.first[:, None]) & (ages >= 0)
        weights = np.where(pending, self.policy.query_weights(np.maximum(ages, 0)), 0)
        num_seen = np.minimum(rows.live[:, None] - ages, rows.live[:, None])
        write_rows, write_cols = np.nonzero(has_block & (columns >= self.config.pinned_blocks))
        return DecodeFlush(
            ring_slots=self._tensor(rows.slots),
            blocks=self._tensor(blocks),
            visible=self._tensor(np.arange(columns.size * bs) < num_seen[:, :, None]),
            seen_by_all=int(num_seen.min()),
            weights=self._tensor(weights.astype(np.float32)),
            decay=self._tensor(self.policy.decay(rows.stop - rows.first)),
            write_rows=self._tensor(write_rows),
            write_cols=self._tensor(write_cols),
            write_blocks=self._tensor(blocks[write_rows, write_cols]),
        )

    def _compaction(self, batch: Batch, dropped_blocks: IntArray) -> Compaction:
        config, bs = self.config, self.config.block_size
        due = dropped_blocks > 0
        rows, dropped = batch.select(due), dropped_blocks[due] * bs
        live = rows.total - rows.gap_blocks * bs
        columns = np.arange(-(-int(live.max()) // bs))
        has_block = columns < -(-live // bs)[:, None]
        blocks = np.where(has_block, rows.live_table[:, : columns.size], NULL_BLOCK)
        slots = np.arange(columns.size * bs)
        movable = slots >= config.pinned_tokens
        return Compaction(
            blocks=self._tensor(blocks.astype(np.int64)),
            live=self._mask(slots < live[:, None]),
            eligible=self._mask(movable & (slots < live[:, None] - config.recent_tokens)),
            freed=self._mask(movable & (slots < config.pinned_tokens + dropped[:, None])),
            num_dropped_tokens=self._tensor(dropped),
            pinned_tokens=config.pinned_tokens,
            score_pool=config.score_pool,
            by_block=config.granularity == "block",
        )

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _mask(self, array: npt.NDArray[np.bool_]) -> torch.Tensor:
        return self._tensor(array)[:, None]


@dataclass(frozen=True)
class _FlushRows:
    """Rows with kept queries to score: ring offsets ``[first, stop)``, seeing ``live`` tokens at the end."""

    slots: IntArray
    first: IntArray
    stop: IntArray
    live: IntArray
    live_table: BlockTable

    @classmethod
    def of(
        cls,
        batch: Batch,
        slots: IntArray,
        first: IntArray,
        stop: IntArray | int,
        block_size: int,
        new: int,
    ) -> "_FlushRows":
        live = batch.computed + new - batch.gap_blocks * block_size
        return cls(slots, first, np.broadcast_to(stop, slots.shape), live, batch.live_table)

    def select(self, rows: IntArray) -> "_FlushRows":
        return _FlushRows(*(getattr(self, field)[rows] for field in self.__dataclass_fields__))


def _tails(batch: Batch, block_size: int) -> IntArray:
    """Ids of the blocks that the rows' next tokens go to."""
    return batch.table[np.arange(batch.new.size), batch.computed // block_size].astype(np.int64)
