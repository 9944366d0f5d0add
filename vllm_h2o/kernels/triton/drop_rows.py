"""Launches that drop tokens: rank, choose, move."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.triton import compaction, ranks
from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.upload import live_table, to_device
from vllm_h2o.step_plan import DropRows

SCRATCH_BYTES = 64 << 20
"""Most scratch memory of one compaction, but for a single longer row."""

_TILE = 1024
"""Elements of one-dimensional tiles."""

_TILE_ELEMENTS = 2048
"""Of tiles of whole tokens: what leaves room for their addresses in the registers."""

_TILE_BLOCKS = 16


@dataclass(frozen=True)
class DropWork:
    """A ``DropRows``, longest rows first, and its descriptors on the device."""

    config: KVPolicyConfig
    rows: DropRows
    device_rows: tuple[torch.Tensor, ...]
    total_weights: torch.Tensor

    @classmethod
    def of(cls, rows: DropRows, config: KVPolicyConfig, device: torch.device) -> "DropWork":
        order = np.argsort(-rows.num_live, kind="stable")
        ordered = DropRows(
            rows.num_live[order],
            rows.num_dropped[order],
            rows.live_table[order],
            rows.num_tokens[order],
            rows.pinned_tokens[order],
            rows.total_weights,
        )
        columns: list[Any] = [
            ordered.num_live,
            ordered.num_dropped,
            ordered.num_tokens,
            ordered.pinned_tokens,
        ]
        columns.append(rows.total_weights)
        *tensors, total_weights = to_device(columns, device)
        table = live_table(ordered.live_table, -(-int(ordered.num_live[0]) // config.block_size), device)
        return cls(config, ordered, (*tensors, table), total_weights)

    def run(self, group: LayerGroup) -> None:
        """Drop the rows' tokens in all layers of the group."""
        for part in self._parts(group):
            _drop(self, group, part)

    def _parts(self, group: LayerGroup) -> Iterator[slice]:
        """Rows whose scratch memory fits ``SCRATCH_BYTES``."""
        rows, begin = self.rows, 0
        pieces_of_row = group.num_kv_heads * len(group.layers)
        while begin < rows.num_live.size:
            sizes = (rows.num_live[begin], rows.num_dropped[begin:].max(), rows.num_tokens[begin:].max())
            row_bytes = pieces_of_row * piece_bytes(self.config, *map(int, sizes))
            end = begin + max(1, SCRATCH_BYTES // row_bytes)
            yield slice(begin, end)
            begin = end


def piece_bytes(config: KVPolicyConfig, live: int, dropped: int, tokens: int) -> int:
    """Scratch memory of one piece: ranks, victims, moves, and what pooling, blocks and keys take."""
    pooling = 8 * live + 8 * -(-tokens // 32) if config.score_pool > 1 else 0
    return 5 * (live + config.block_size) + 8 * dropped + pooling + live // 2 + 4 * 256


def _drop(work: DropWork, group: LayerGroup, part: slice) -> None:
    config, rows, block_size = work.config, work.rows, group.block_size
    num_live, num_dropped, num_tokens, pinned, table = (tensor[part] for tensor in work.device_rows)
    pieces = (group.num_kv_heads * num_live.numel(), len(group.layers))
    width = triton.cdiv(int(rows.num_live[part][0]), block_size) * block_size
    heads: dict[str, Any] = {"NUM_KV_HEADS": group.num_kv_heads}
    row: dict[str, Any] = {"num_live": num_live, "table": table, "table_stride": table.stride(0)}

    def scratch(columns: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(pieces[0] * pieces[1], columns, dtype=dtype, device=group.device)

    token_ranks = scratch(width, torch.float32)
    _rank(work, group, token_ranks, row, num_tokens, pieces, scratch)
    by_block, pooled = config.granularity == "block", config.score_pool > 1
    slot_of_age = token_ranks  # not read without pooling
    if pooled:
        most_tokens = int(rows.num_tokens[part].max())
        slot_of_age = _pool(work, group, token_ranks, row, pinned, most_tokens, pieces, scratch)
    unit, unit_ranks = 1, token_ranks
    if by_block:
        unit, unit_ranks = block_size, scratch(width // block_size, torch.float32)
        compaction.sum_blocks_kernel[(triton.cdiv(width // block_size, _TILE_BLOCKS), *pieces)](
            token_ranks, unit_ranks, num_live, width, **heads, BLOCK_SIZE=block_size, TILE_BLOCKS=_TILE_BLOCKS
        )
    victims = scratch(width // unit, torch.int8)
    compaction.select_lowest_kernel[(1, *pieces)](
        unit_ranks, slot_of_age, victims, num_live, num_dropped, pinned, width // unit, config.recent_tokens,
        **heads, UNIT=unit, BY_AGE=pooled and not by_block, TILE=_TILE,
    )  # fmt: skip
    most_dropped = int(rows.num_dropped[part].max())
    sources, targets, num_moves = scratch(most_dropped), scratch(most_dropped), scratch(1)
    compaction.pair_moves_kernel[(1, *pieces)](
        victims, sources, targets, num_moves, num_live, num_dropped, pinned, width // unit, most_dropped,
        config.recent_tokens, **heads, UNIT=unit, TILE=_TILE,
    )  # fmt: skip
    tile = _tile_tokens(group)
    compaction.move_tokens_kernel[(triton.cdiv(most_dropped, tile), *pieces)](
        group.key_ptrs, group.value_ptrs, group.score_ptrs, group.position_ptrs, sources, targets, num_moves,
        table, **group.key_strides, **group.value_strides, **group.score_strides,
        table_stride=table.stride(0), move_width=most_dropped, **group.sizes, ELEMENT_TYPE=group.bits_type,
        HAS_POSITIONS=group.has_positions, TILE=tile,
    )  # fmt: skip


def _rank(
    work: DropWork, group: LayerGroup, token_ranks: torch.Tensor, row: dict[str, Any],
    num_tokens: torch.Tensor, pieces: tuple[int, int], scratch: Any,
) -> None:  # fmt: skip
    """Fill ``token_ranks [P, width]``."""
    rank_by, tile = work.config.rank_by, _tile_tokens(group)
    anchors = token_ranks  # not read without keys
    if rank_by == "keys":
        anchors = scratch(group.sizes["PADDED_SIZE"], torch.float32)
        ranks.mean_key_kernel[(1, *pieces)](
            group.key_ptrs, anchors, **row, **group.key_strides, **group.sizes, KEY_TYPE=group.key_type,
            TILE=tile,
        )  # fmt: skip
    width = token_ranks.shape[1]
    ranks.rank_tokens_kernel[(triton.cdiv(width, tile), *pieces)](
        group.key_ptrs, group.value_ptrs, group.score_ptrs, group.position_ptrs, anchors, work.total_weights,
        token_ranks, num_tokens=num_tokens, width=width, **row, **group.key_strides, **group.value_strides,
        **group.score_strides, **group.sizes, KEY_TYPE=group.key_type, RANK_BY=rank_by, TILE=tile,
    )  # fmt: skip


def _pool(
    work: DropWork, group: LayerGroup, token_ranks: torch.Tensor, row: dict[str, Any], pinned: torch.Tensor,
    most_tokens: int, pieces: tuple[int, int], scratch: Any,
) -> torch.Tensor:  # fmt: skip
    """Pool ``token_ranks``, by age (or by slot, for whole blocks); returns the slot of each age."""
    config, width = work.config, token_ranks.shape[1]
    tiles = (triton.cdiv(width, _TILE), *pieces)
    num_words = triton.cdiv(most_tokens, 32)
    bitmap, below = scratch(num_words).zero_(), scratch(num_words)
    slot_of_age, aged = scratch(width), scratch(width, torch.float32)
    side = {**row, **group.score_strides, "num_words": num_words, "NUM_KV_HEADS": group.num_kv_heads}
    ranks.mark_positions_kernel[tiles](
        group.position_ptrs, bitmap, **side, BLOCK_SIZE=group.block_size, TILE=_TILE
    )
    ranks.count_below_kernel[(1, *pieces)](
        bitmap, below, num_words, NUM_KV_HEADS=group.num_kv_heads, TILE=_TILE
    )
    ranks.order_by_age_kernel[tiles](
        group.position_ptrs, bitmap, below, token_ranks, slot_of_age, aged, **side, width=width,
        BLOCK_SIZE=group.block_size, TILE=_TILE,
    )  # fmt: skip
    ranks.pool_ranks_kernel[tiles](
        aged, slot_of_age, token_ranks, row["num_live"], pinned, width,
        NUM_KV_HEADS=group.num_kv_heads, POOL=config.score_pool, BY_SLOT=config.granularity == "block",
        TILE=_TILE,
    )  # fmt: skip
    return slot_of_age


def _tile_tokens(group: LayerGroup) -> int:
    return max(1, _TILE_ELEMENTS // group.sizes["PADDED_SIZE"])
