"""What one step has to do beyond stock attention, as numbers for all layers (from ``vllm_h2o.planner``)."""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from vllm_h2o.trace import TraceLog

IntArray = npt.NDArray[np.int64]
BlockTable = npt.NDArray[np.int32]

NULL_BLOCK = 0
"""vLLM's block for padding; a row whose tail is here computes nothing real."""


def nothing() -> IntArray:
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
        pinned_tokens: first tokens that are never dropped, whole blocks; behind them is what will be freed.
        total_weights: ``[max_model_len]`` float32, where a rank is a mean: entry ``n - 1`` is the weight of
            the ``n`` queries that saw a token, to divide its score by; else empty.
    """

    num_live: IntArray
    num_dropped: IntArray
    live_table: BlockTable
    num_tokens: IntArray
    pinned_tokens: IntArray
    total_weights: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))

    def kept_blocks(self, block_size: int) -> list[BlockTable]:
        """Per row the ids of the blocks that it goes on with, in order."""
        num_blocks = -(-self.num_live // block_size)
        begin = self.pinned_tokens // block_size
        end = begin + self.num_dropped // block_size
        return [
            np.delete(blocks[:count], np.s_[first:last])
            for blocks, count, first, last in zip(self.live_table, num_blocks, begin, end, strict=True)
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
        table: of a plan for a device (``vllm_h2o.device_plan``), the block table there.
    """

    append_tokens: IntArray = field(default_factory=nothing)
    append_slots: IntArray = field(default_factory=nothing)
    started_blocks: IntArray = field(default_factory=nothing)
    started_positions: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    scores: tuple[ScoreRows, ...] = ()
    drops: DropRows | None = None
    trace: TraceLog | None = None
    trace_steps: tuple[int, ...] = ()
    table: Any = None

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
        gap_blocks_after: blocks that are gone at the step's end.
        pinned_blocks: in front of the gap.
        evicts: bool; whether the row's request can lose tokens at all.
    """

    computed: IntArray
    new: IntArray
    first_token: IntArray
    table: Any
    gap_blocks: IntArray
    live_table: Any
    gap_blocks_after: IntArray
    pinned_blocks: IntArray
    evicts: npt.NDArray[np.bool_]

    @property
    def total(self) -> IntArray:
        return self.computed + self.new

    @property
    def has_gap(self) -> bool:
        return bool(self.gap_blocks.any())

    def select(self, rows: npt.NDArray[np.bool_]) -> Self:
        return type(self)(*(getattr(self, field)[rows] for field in self.__dataclass_fields__))
