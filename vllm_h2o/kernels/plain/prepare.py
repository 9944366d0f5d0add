"""A step's work as tensors, and carrying it out with torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.base import Kernels, LayerSizes, LayerState, PreparedStep
from vllm_h2o.kernels.plain.compaction import Compaction, compact
from vllm_h2o.kernels.plain.ranks import RankRule, drawn_scores
from vllm_h2o.kernels.plain.scoring import (
    TILE_BYTES,
    DecodeFlush,
    PrefillChunk,
    score_decode,
    score_prefill,
)
from vllm_h2o.step_plan import NULL_BLOCK, BlockTable, DropRows, IntArray, ScoreRows, StepPlan

MAX_FLUSH_SLOTS = 4096
"""Slots (rows times the longest row) scored in one batch: its logits then stay in the CPU's cache."""


class PlainKernels(Kernels):
    """The reference among the implementations, and what runs where no other can."""

    name = "torch"

    def prepare(self, plan: StepPlan) -> "PlainStep":
        config = self.config
        scores: list[DecodeFlush | PrefillChunk] = []
        for rows in plan.scores:
            chunks = np.flatnonzero(~rows.from_ring)
            scores += [
                *_flushes(rows, np.flatnonzero(rows.from_ring), config),
                *_chunks(rows, chunks, config),
            ]
        return PlainStep(
            append_tokens=tensor(plan.append_tokens),
            append_slots=tensor(plan.append_slots),
            started_blocks=tensor(plan.started_blocks),
            started_positions=tensor(plan.started_positions),
            scores=tuple(scores),
            compaction=None if plan.drops is None else _compaction(plan.drops, config),
            draws=config.rank_by == "random",
        )

    def scratch_bytes(self, sizes: LayerSizes) -> int:
        """The keys of the longest rows as float32, their logits, and the probabilities beside those."""
        config = self.config
        live_tokens = config.max_blocks_per_request * config.block_size
        if not config.scores_attention:
            # The keys of one row and their directions, as float32.
            return 3 * 4 * live_tokens * sizes.num_kv_heads * sizes.head_size
        flushed_slots = max(MAX_FLUSH_SLOTS, config.budget_tokens)
        gathered = 4 + sizes.element_bytes  # the float32 copy, and the gathered blocks before it
        logits = max(
            TILE_BYTES,
            4 * sizes.num_heads * live_tokens,
            4 * sizes.num_heads * config.block_size * flushed_slots,
        )
        keys = max(live_tokens, flushed_slots) * sizes.num_kv_heads * sizes.head_size * gathered
        return keys + 2 * logits


@dataclass(frozen=True)
class PlainStep(PreparedStep):
    """Tensors that serve all layers; fields as in ``StepPlan``."""

    append_tokens: torch.Tensor
    append_slots: torch.Tensor
    started_blocks: torch.Tensor
    started_positions: torch.Tensor
    scores: tuple[DecodeFlush | PrefillChunk, ...]
    compaction: Compaction | None
    draws: bool

    def update_scores(self, layer: LayerState, query: torch.Tensor) -> None:
        cache = layer.cache
        if self.append_tokens.numel():
            layer.ring[self.append_slots] = query[self.append_tokens]
        if self.started_blocks.numel():
            cache.start_blocks(self.started_blocks, self.started_positions)
            if self.draws:
                drawn = drawn_scores(self.started_positions, cache.scores.shape[1], layer.salt)
                cache.scores[self.started_blocks] = drawn
        for work in self.scores:
            if isinstance(work, DecodeFlush):
                ring = layer.ring.unflatten(0, (-1, cache.block_size))
                score_decode(cache, ring, work, layer.shape)
            else:
                score_prefill(cache, query, work, layer.shape)

    def drop_tokens(self, layer: LayerState) -> None:
        if self.compaction is not None:
            compact(layer.cache, self.compaction)


def tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """A tensor of the array; it shares the array's memory where that is contiguous."""
    return torch.from_numpy(np.ascontiguousarray(array))


def _chunks(rows: ScoreRows, chosen: IntArray, config: KVPolicyConfig) -> Iterator[PrefillChunk]:
    for row in chosen:
        count, live = int(rows.num_queries[row]), int(rows.num_live[row])
        num_blocks = -(-live // config.block_size)
        yield PrefillChunk(
            first_token=int(rows.first_query[row]),
            num_queries=count,
            num_live=live,
            blocks=tensor(rows.live_table[row, :num_blocks].astype(np.int64)),
            pinned_blocks=min(config.pinned_blocks, num_blocks),
            weights=tensor(rows.weights[rows.weights.size - count :]),
            decay=float(rows.decay[row]),
        )


def _flushes(rows: ScoreRows, chosen: IntArray, config: KVPolicyConfig) -> Iterator[DecodeFlush]:
    """Batches of at most ``MAX_FLUSH_SLOTS``, rows of like length together."""
    order = chosen[np.argsort(-rows.num_live[chosen], kind="stable")]
    begin = 0
    while begin < order.size:
        count = max(1, MAX_FLUSH_SLOTS // int(rows.num_live[order[begin]]))
        yield _flush(rows, order[begin : begin + count], config)
        begin += count


def _flush(rows: ScoreRows, chosen: IntArray, config: KVPolicyConfig) -> DecodeFlush:
    bs = config.block_size
    live = rows.num_live[chosen]
    blocks, has_block = _padded(rows.live_table[chosen], live, bs)
    ring_slots, first = np.divmod(rows.first_query[chosen], bs)
    ages = (first + rows.num_queries[chosen])[:, None] - 1 - np.arange(bs)
    pending = (np.arange(bs) >= first[:, None]) & (ages >= 0)
    weights = np.where(pending, rows.weights[rows.weights.size - 1 - np.where(pending, ages, 0)], 0)
    num_seen = np.minimum(live[:, None] - ages, live[:, None])
    write_rows, write_cols = np.nonzero(has_block & (np.arange(blocks.shape[1]) >= config.pinned_blocks))
    return DecodeFlush(
        ring_slots=tensor(ring_slots),
        blocks=tensor(blocks),
        visible=tensor(np.arange(blocks.shape[1] * bs) < num_seen[:, :, None]),
        seen_by_all=int(num_seen.min()),
        weights=tensor(weights.astype(np.float32)),
        decay=tensor(rows.decay[chosen]),
        write_rows=tensor(write_rows),
        write_cols=tensor(write_cols),
        write_blocks=tensor(blocks[write_rows, write_cols]),
    )


def _compaction(rows: DropRows, config: KVPolicyConfig) -> Compaction:
    bs, live = config.block_size, rows.num_live
    blocks, _ = _padded(rows.live_table, live, bs)
    slots = np.arange(blocks.shape[1] * bs)
    pinned = rows.pinned_tokens[:, None]
    movable = slots >= pinned
    masks = {
        "live": slots < live[:, None],
        "pinned": ~movable,
        "eligible": movable & (slots < live[:, None] - config.recent_tokens),
        "freed": movable & (slots < pinned + rows.num_dropped[:, None]),
    }
    return Compaction(
        blocks=tensor(blocks),
        **{name: tensor(mask)[:, None] for name, mask in masks.items()},
        num_dropped_tokens=tensor(rows.num_dropped),
        score_pool=config.score_pool,
        by_block=config.granularity == "block",
        rule=RankRule(config.rank_by, tensor(rows.num_tokens), tensor(rows.total_weights)),
    )


def _padded(
    live_table: BlockTable, num_live: IntArray, block_size: int
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Live block ids ``[R, M]`` int64 with the null block behind, and where a block is."""
    num_blocks = -(-num_live // block_size)
    columns = np.arange(int(num_blocks.max()))
    has_block = columns < num_blocks[:, None]
    blocks = np.where(has_block, live_table[:, : columns.size], NULL_BLOCK)
    return blocks.astype(np.int64), has_block
