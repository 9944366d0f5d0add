"""What tokens rank by when some have to go (``vllm_h2o.config.RANKS``), before pooling."""

from dataclasses import dataclass

import torch

from vllm_h2o.config import RankBy
from vllm_h2o.layout import PagedLayer


@dataclass(frozen=True)
class RankRule:
    """How to rank; the tensors serve all layers.

    Attributes:
        by: the rule.
        num_tokens: ``[R]`` int64, tokens of each row so far, dropped ones too.
        total_weights: ``[max_model_len]`` float32, for ``mean``: entry ``n - 1`` is the weight of ``n``
            queries.
    """

    by: RankBy
    num_tokens: torch.Tensor
    total_weights: torch.Tensor


def token_ranks(
    layer: PagedLayer,
    blocks: torch.Tensor,
    live: torch.Tensor,
    rule: RankRule,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """``[R, H, S]`` float32; what stands behind a row's last token means nothing.

    Args:
        blocks: ``[R, M]`` int64.
        live: ``[R, 1, S]`` bool.
        positions: ``[R, H, S]`` int32 or None; needed for ``mean``.
    """
    if rule.by == "keys":
        rows = zip(blocks, live[:, 0], strict=True)
        return torch.stack([_key_difference(layer, row, is_live) for row, is_live in rows])
    scores = _by_slot(layer.scores[blocks])
    if rule.by == "age":
        return torch.zeros_like(scores)
    if rule.by == "value":
        # Row by row: the values of all rows together may be large.
        norms = torch.stack([layer.values_of(row).float().abs_().sum(dim=3) for row in blocks])
        return scores * _by_slot(norms)
    if rule.by == "mean":
        assert positions is not None, "mean needs positions"
        num_queries = rule.num_tokens[:, None, None] - positions
        # Behind the last token a position is whatever it was.
        index = torch.where(live, num_queries - 1, 0).long()
        return scores / rule.total_weights[index]
    return scores


def drawn_scores(positions: torch.Tensor, num_kv_heads: int, salt: int) -> torch.Tensor:
    """``[n, H, block_size]`` float32 in [0, 1): a hash of position, layer and head (32-bit, two rounds).

    Args:
        positions: ``[n, block_size]`` int32.
        salt: tells layers apart.
    """
    heads = torch.arange(num_kv_heads, dtype=torch.int64) + salt * num_kv_heads
    x = positions[:, None].long() * 0x9E3779B1 + heads[:, None] * 0x85EBCA77 & 0xFFFFFFFF
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ x >> 16) * factor & 0xFFFFFFFF
    return ((x ^ x >> 16) >> 8).float() / 2**24


def _by_slot(of_blocks: torch.Tensor) -> torch.Tensor:
    """``[R, M, H, bs]`` as ``[R, H, S]``."""
    return of_blocks.transpose(1, 2).flatten(2)


def _key_difference(layer: PagedLayer, blocks: torch.Tensor, is_live: torch.Tensor) -> torch.Tensor:
    """``[H, S]``, one row: 1 - cos(key, mean of the normalised live keys)."""
    keys = layer.keys_of(blocks).float().permute(1, 0, 3, 2).flatten(1, 2)  # [H, S, D]
    directions = torch.nn.functional.normalize(keys.masked_fill(~is_live[:, None], 0), dim=2)
    anchor = torch.nn.functional.normalize(directions.sum(dim=1, keepdim=True), dim=2)
    return 1 - (directions * anchor).sum(dim=2)
