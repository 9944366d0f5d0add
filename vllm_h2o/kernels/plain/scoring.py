"""Heavy-hitter scores: per KV head and slot, the attention that all queries gave to it.

The probabilities are recomputed from Q and K, so every stock attention kernel can stay as it is. Two
cases, exact in both:

* a chunk of a prompt: all its queries are at hand and are scored at once, in tiles whose logits stay in
  the cache;
* decode: the queries of a tail block are kept (``vllm_h2o.query_ring``) and scored together when the block
  fills, which reads K once per block rather than once per token.

The plain float64 statement of both is ``tests/reference.py``.
"""

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.layout import PagedLayer

QUERY_TILE = 64
"""Most queries scored at a time in a prefill."""

TILE_BYTES = 4 * 2**20
"""Most bytes of a prefill tile's logits: they should stay in the CPU's cache, whatever the context."""


@dataclass(frozen=True)
class DecodeFlush:
    """Rows whose kept queries are scored in this step; the tensors serve all layers.

    ``R`` rows, ``M`` blocks in the longest row, ``bs`` block size.

    Attributes:
        ring_slots: ``[R]`` int64.
        blocks: ``[R, M]`` int64, each row's live blocks in order, padded with block 0.
        visible: ``[R, bs, M * bs]`` bool: does the query at this ring offset see this slot.
        seen_by_all: leading slots that every query of every row sees, so that they need no mask.
        weights: ``[R, bs]`` float32, weight of each query; 0 where none is pending.
        decay: ``[R]`` float32, factor on what is stored.
        write_rows, write_cols, write_blocks: ``[W]`` int64, the (row, column, id) of every block whose
            scores change: the live blocks that aren't pinned.
    """

    ring_slots: torch.Tensor
    blocks: torch.Tensor
    visible: torch.Tensor
    seen_by_all: int
    weights: torch.Tensor
    decay: torch.Tensor
    write_rows: torch.Tensor
    write_cols: torch.Tensor
    write_blocks: torch.Tensor


@dataclass(frozen=True)
class PrefillChunk:
    """One row with several new tokens.

    Attributes:
        first_token: index of its first query in the batch.
        num_queries: number of new tokens.
        num_live: live tokens with the chunk, the keys that its last query sees.
        blocks: ``[m]`` int64, live blocks in order.
        pinned_blocks: how many of them are pinned and keep no score.
        weights: ``[num_queries]`` float32.
        decay: factor on what is stored.
    """

    first_token: int
    num_queries: int
    num_live: int
    blocks: torch.Tensor
    pinned_blocks: int
    weights: torch.Tensor
    decay: float


def score_decode(layer: PagedLayer, ring: torch.Tensor, flush: DecodeFlush, shape: AttentionShape) -> None:
    """Add the attention of the kept queries of all flushed rows to the stored scores.

    Args:
        layer: views of the layer's cache; its scores change.
        ring: ``[num_slots, bs, num_heads, head_size]``, the kept queries.
    """
    num_rows, num_cols = flush.blocks.shape
    num_kv_heads, head_size, bs = layer.num_kv_heads, layer.head_size, layer.block_size
    group = ring.shape[2] // num_kv_heads
    num_slots = num_cols * bs
    # [R, M, H, D, bs] -> [R * H, D, M * bs]
    keys = layer.keys_of(flush.blocks).permute(0, 2, 3, 1, 4).reshape(-1, head_size, num_slots).float()
    # A weight of 0 alone would let NaN through that an earlier owner of the slot may have left.
    queries = ring[flush.ring_slots].masked_fill_(flush.weights[:, :, None, None] == 0, 0)
    # [R, bs, H, G, D] -> [R * H, bs * G, D]
    queries = queries.unflatten(2, (num_kv_heads, group))
    queries = queries.permute(0, 2, 1, 3, 4).reshape(-1, bs * group, head_size).float()
    logits = torch.bmm(queries * shape.scale, keys)
    logits = _softcapped(logits.view(num_rows, num_kv_heads, bs, group, num_slots), shape)
    # Overwrites, so NaN in slots past a row's end can't spread.
    hidden = ~flush.visible[:, None, :, None, flush.seen_by_all :]
    logits[..., flush.seen_by_all :].masked_fill_(hidden, -torch.inf)
    probs = _probabilities(logits, shape.sinks, num_kv_heads)
    weights = flush.weights[:, None, :, None].expand(num_rows, num_kv_heads, bs, group)
    added = torch.matmul(weights.reshape(num_rows, num_kv_heads, 1, bs * group), probs.flatten(2, 3)).view(
        num_rows, num_kv_heads, num_cols, bs
    )
    rows, cols = flush.write_rows, flush.write_cols
    old = layer.scores[flush.write_blocks]
    layer.scores[flush.write_blocks] = old * flush.decay[rows, None, None] + added[rows, :, cols]


def score_prefill(layer: PagedLayer, query: torch.Tensor, chunk: PrefillChunk, shape: AttentionShape) -> None:
    """Add the attention of a chunk's queries to the stored scores.

    Args:
        layer: views of the layer's cache, the chunk's keys included; its scores change.
        query: ``[num_tokens, num_heads, head_size]``, the whole batch.
    """
    num_kv_heads, head_size, bs = layer.num_kv_heads, layer.head_size, layer.block_size
    group = query.shape[1] // num_kv_heads
    num_live, num_queries = chunk.num_live, chunk.num_queries
    keys = torch.empty(num_kv_heads, head_size, chunk.blocks.numel(), bs, device=query.device)
    keys.copy_(layer.keys_of(chunk.blocks).permute(1, 2, 0, 3))
    keys = keys.flatten(2)
    added = keys.new_zeros(num_kv_heads, keys.shape[2])
    tile_queries = max(1, min(QUERY_TILE, TILE_BYTES // (4 * query.shape[1] * num_live)))
    for start in range(0, num_queries, tile_queries):
        stop = min(start + tile_queries, num_queries)
        count = stop - start
        num_seen = num_live - num_queries + stop
        tile = query[chunk.first_token + start : chunk.first_token + stop]
        tile = tile.unflatten(1, (num_kv_heads, group)).permute(1, 0, 2, 3)
        tile = tile.reshape(num_kv_heads, count * group, head_size).float() * shape.scale
        logits = torch.bmm(tile, keys[:, :, :num_seen]).view(num_kv_heads, count, group, num_seen)
        logits = _softcapped(logits, shape)
        hidden = torch.ones(count, count, dtype=torch.bool, device=query.device).triu_(1)
        logits[..., num_seen - count :].masked_fill_(hidden[None, :, None], -torch.inf)
        probs = _probabilities(logits[None], shape.sinks, num_kv_heads)[0]
        weights = chunk.weights[start:stop].repeat_interleave(group)
        added[:, :num_seen] += torch.matmul(weights, probs.flatten(1, 2))
    added = added.unflatten(1, (-1, bs)).transpose(0, 1)[chunk.pinned_blocks :]
    blocks = chunk.blocks[chunk.pinned_blocks :]
    layer.scores[blocks] = layer.scores[blocks] * chunk.decay + added


def _softcapped(logits: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    if shape.softcap:
        logits = logits.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return logits


def _probabilities(logits: torch.Tensor, sinks: torch.Tensor | None, num_kv_heads: int) -> torch.Tensor:
    """Softmax over the last dimension of ``[R, H, Q, G, L]``; a sink adds to the denominator only."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    sink = sinks.float().view(num_kv_heads, 1, -1, 1)
    log_total = torch.logaddexp(torch.logsumexp(logits, dim=-1, keepdim=True), sink)
    return torch.exp(logits - log_total)
