"""Launches that score rows."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.triton import scoring
from vllm_h2o.kernels.triton.layers import LayerGroup, triton_type
from vllm_h2o.kernels.triton.upload import live_table, to_device
from vllm_h2o.step_plan import ScoreRows


@dataclass(frozen=True)
class ScoreWork:
    """A ``ScoreRows`` on the device; names and shapes as there and in ``scoring.py``."""

    from_ring: bool
    rows: dict[str, torch.Tensor]
    weights: torch.Tensor
    decay: torch.Tensor
    total_queries: int
    most_queries: int
    longest: int
    pinned_tokens: int

    @classmethod
    def of(cls, rows: ScoreRows, config: KVPolicyConfig, device: torch.device) -> "ScoreWork":
        longest = int(rows.num_live.max())
        (from_ring,) = set(rows.from_ring.tolist())
        columns = {
            "first_query": rows.first_query,
            "num_queries": rows.num_queries,
            "num_live": rows.num_live,
            "lse_start": np.cumsum(rows.num_queries) - rows.num_queries,
        }
        *tensors, weights, decay = to_device([*columns.values(), rows.weights, rows.decay], device)
        table = live_table(rows.live_table, -(-longest // config.block_size), device)
        return cls(
            from_ring=from_ring,
            rows={**dict(zip(columns, tensors, strict=True)), "table": table},
            weights=weights,
            decay=decay,
            total_queries=int(rows.num_queries.sum()),
            most_queries=int(rows.num_queries.max()),
            longest=longest,
            pinned_tokens=config.pinned_tokens,
        )

    def run(self, group: LayerGroup, query: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Add the rows' attention to the scores of all layers of the group.

        Args:
            query: the batch's queries of the one layer, or the ring of the group's first layer.
            lse: ``[L, total_queries, num_heads]`` float32, in base 2, where it is known already.
        """
        num_layers, num_rows = len(group.layers), self.decay.numel()
        row_width = num_layers, group.num_kv_heads * num_rows
        tiles = _score_tiles(group, query.dtype)
        common = {
            **self.rows,
            "query_ptrs": group.ring_ptrs if self.from_ring else query,
            "IN_TABLE": self.from_ring,
            "key_ptrs": group.key_ptrs,
            "scales": group.scales,
            "query_stride_token": query.stride(0),
            "query_stride_head": query.stride(1),
            "table_stride": self.rows["table"].stride(0),
            "GROUP": group.num_heads // group.num_kv_heads,
            "SOFTCAP": group.first.shape.softcap,
            "QUERY_TYPE": triton_type(query.dtype),
            "KEY_TYPE": group.key_type,
            "DOT_TYPE": _dot_type(query.dtype),
            **group.key_strides,
            **group.sizes,
            **tiles,
        }
        if lse is None:
            shape = (num_layers, self.total_queries, group.num_heads)
            lse = torch.empty(shape, dtype=torch.float32, device=group.device)
            query_rows = self.most_queries * common["GROUP"]
            grid = (triton.cdiv(query_rows, tiles["TILE_QUERIES"]), *row_width[::-1])
            scoring.softmax_lse_kernel[grid](
                **common, sinks=group.sinks, lse=lse, lse_stride_layer=lse.stride(0),
                lse_stride_query=lse.stride(1), HAS_SINKS=group.sinks.numel() > 0,
            )  # fmt: skip
        most_slots = self.longest - self.pinned_tokens
        if most_slots <= 0:
            return
        grid = (triton.cdiv(most_slots, tiles["TILE_SLOTS"]), *row_width[::-1])
        scoring.add_scores_kernel[grid](
            **common, score_ptrs=group.score_ptrs, lse=lse, weights=self.weights, decay=self.decay,
            **group.score_strides, lse_stride_layer=lse.stride(0), lse_stride_query=lse.stride(1),
            num_weights=self.weights.numel(), pinned_tokens=self.pinned_tokens,
        )  # fmt: skip


def _score_tiles(group: LayerGroup, dtype: torch.dtype) -> dict[str, int]:
    """Tiles whose logits and operands stay in the registers of 128 threads."""
    row_bytes = group.sizes["PADDED_SIZE"] * dtype.itemsize
    side = 64 if row_bytes <= 256 else 32
    return {"TILE_QUERIES": 16 if dtype == torch.float32 else side, "TILE_SLOTS": side}


def _dot_type(dtype: torch.dtype) -> Any:
    """What Q and K are multiplied as: the queries' dtype. Products are summed in float32.

    The interpreter of Triton 3.9 multiplies the bits of bfloat16 as if they were integers.
    """
    interpreted_bfloat16 = triton.knobs.runtime.interpret and dtype == torch.bfloat16
    return triton_type(torch.float32 if interpreted_bfloat16 else dtype)
