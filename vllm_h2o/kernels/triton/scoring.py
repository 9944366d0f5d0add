"""Heavy-hitter scores on a GPU: exact softmax column sums, recomputed from Q and paged K.

Two passes, so that a score is written once, by one program, without atomics, and is the same to the bit
whatever else is in the batch:

* ``softmax_lse_kernel``: per query and head the logarithm of its softmax's denominator; left out where the
  attention kernel has already returned it;
* ``add_scores_kernel``: per block of keys the sum over queries of ``exp(q . k * scale - lse)``.

Rows, ``R`` of them, are those of a ``ScoreRows`` (``vllm_h2o.step_plan``); layers, ``L`` of them, share one
launch. A row's queries times the ``G`` query heads of a KV head are its *query rows*: query row ``m`` is head
``m % G`` of query ``m // G``.
"""

import triton
import triton.language as tl

from vllm_h2o.kernels.triton import VARYING

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(queries, keys, scale, seen, slots, SOFTCAP: tl.constexpr):
    """``[queries, slots]`` logits in base 2; -inf where a query doesn't see a slot."""
    # Only of float32: three products on tensor cores that together keep its precision.
    logits = tl.dot(queries, keys, input_precision="tf32x3") * scale
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which keeps its sign and limits for any x
        logits = SOFTCAP * LOG2E * (1 - 2 / (tl.exp2(logits * (2 * LOG2E / SOFTCAP)) + 1))
    else:
        logits = logits * LOG2E
    return tl.where(slots[None, :] < seen[:, None], logits, float("-inf"))


@triton.jit
def _queries(query_ptrs, layer, QUERY_TYPE: tl.constexpr, IN_TABLE: tl.constexpr):
    if IN_TABLE:
        return tl.load(query_ptrs + layer).to(tl.pointer_type(QUERY_TYPE))
    else:
        return query_ptrs


@triton.jit
def _query_tile(
    queries, stride_token, stride_head, first, m, num_rows, head,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """``[m, PADDED_SIZE]``: query rows ``m`` of one KV head."""
    d = tl.arange(0, PADDED_SIZE)
    tokens = (first + m // GROUP).to(tl.int64)
    at = queries + tokens * stride_token + (head * GROUP + m % GROUP) * stride_head
    there = (m < num_rows)[:, None] & (d < HEAD_SIZE)[None, :]
    return tl.load(at[:, None] + d[None, :], mask=there, other=0.0)


@triton.jit
def _key_tile(
    keys, table, head, slots, num_live,
    stride_block, stride_head, stride_dim, stride_slot,
    BLOCK_SIZE: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """``[PADDED_SIZE, slots]``: keys of one head at ``slots`` of a row."""
    d = tl.arange(0, PADDED_SIZE)
    live = slots < num_live
    blocks = tl.load(table + slots // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    at = keys + blocks * stride_block + head * stride_head + (slots % BLOCK_SIZE) * stride_slot
    # Not what lies behind a row's end: it may be NaN.
    there = (d < HEAD_SIZE)[:, None] & live[None, :]
    return tl.load(at[None, :] + d[:, None] * stride_dim, mask=there, other=0.0)


@triton.jit(do_not_specialize=VARYING)
def softmax_lse_kernel(
    query_ptrs, key_ptrs, scales, sinks, lse,
    first_query, num_queries, num_live, lse_start, table,
    query_stride_token, query_stride_head,
    key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
    table_stride, lse_stride_layer, lse_stride_query,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    QUERY_TYPE: tl.constexpr, KEY_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr, IN_TABLE: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid ``(query tiles of the longest row, R * H, L)``; reads a row's K once per tile of queries.

    Args:
        query_ptrs: ``[L]`` int64, addresses of rings (IN_TABLE), or the queries of the one layer themselves.
        key_ptrs: ``[L]`` int64, addresses.
        scales: ``[L]`` float32, factor on ``q . k``.
        sinks: ``[L, num_heads]`` float32.
        lse: ``[L, sum of num_queries, num_heads]`` float32, in base 2; a row's queries start at lse_start.
        first_query, num_queries, num_live, lse_start: ``[R]`` int32.
        table: ``[R, width]`` int32.
    """
    row, head, layer = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS, tl.program_id(2)
    queries_of_row, live = tl.load(num_queries + row), tl.load(num_live + row)
    num_rows = queries_of_row * GROUP
    first_m = tl.program_id(0) * TILE_QUERIES
    if first_m >= num_rows:
        return
    m = first_m + tl.arange(0, TILE_QUERIES)
    queries = _queries(query_ptrs, layer, QUERY_TYPE, IN_TABLE)
    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(KEY_TYPE))
    scale = tl.load(scales + layer)
    q = _query_tile(
        queries, query_stride_token, query_stride_head, tl.load(first_query + row), m, num_rows, head,
        GROUP, HEAD_SIZE, PADDED_SIZE,
    ).to(DOT_TYPE)  # fmt: skip
    # Rows of the tile behind the last see one slot, so that their sums are numbers.
    seen = tl.where(m < num_rows, live - queries_of_row + m // GROUP + 1, 1)
    if HAS_SINKS:
        heads = head * GROUP + m % GROUP
        top = tl.load(sinks + layer * NUM_KV_HEADS * GROUP + heads) * LOG2E
        total = tl.full((TILE_QUERIES,), 1.0, tl.float32)
    else:
        top = tl.full((TILE_QUERIES,), float("-inf"), tl.float32)
        total = tl.zeros((TILE_QUERIES,), tl.float32)
    end = tl.minimum(live, live - queries_of_row + (first_m + TILE_QUERIES - 1) // GROUP + 1)
    for start in range(0, end, TILE_SLOTS):
        slots = start + tl.arange(0, TILE_SLOTS)
        k = _key_tile(
            keys, table + row * table_stride, head, slots, live,
            key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
            BLOCK_SIZE, HEAD_SIZE, PADDED_SIZE,
        )  # fmt: skip
        logits = _logits(q, k.to(DOT_TYPE), scale, seen, slots, SOFTCAP)
        # Every query sees slot 0, which is in the first tile, so `top` is finite from there on.
        new_top = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp2(top - new_top) + tl.sum(tl.exp2(logits - new_top[:, None]), 1)
        top = new_top
    at = (
        lse
        + layer * lse_stride_layer
        + (tl.load(lse_start + row) + m // GROUP).to(tl.int64) * lse_stride_query
    )
    tl.store(at + head * GROUP + m % GROUP, top + tl.log2(total), mask=m < num_rows)


@triton.jit(do_not_specialize=VARYING)
def add_scores_kernel(
    query_ptrs, key_ptrs, score_ptrs, scales, lse,
    first_query, num_queries, num_live, lse_start, table, weights, decay,
    query_stride_token, query_stride_head,
    key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
    score_stride_block, score_stride_head,
    table_stride, lse_stride_layer, lse_stride_query, num_weights, pinned_tokens,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr,
    QUERY_TYPE: tl.constexpr, KEY_TYPE: tl.constexpr, DOT_TYPE: tl.constexpr, IN_TABLE: tl.constexpr,
    TILE_QUERIES: tl.constexpr, TILE_SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of slots of the longest row, R * H, L)``; reads a tile's K once, and Q once per tile.

    ``scores = scores * decay + sum over queries of weight * probability``, but for pinned tokens, which may
    be shared and keep no scores. Arguments as in ``softmax_lse_kernel``, and

    Args:
        score_ptrs: ``[L]`` int64.
        weights: ``[num_weights]`` float32; a row's queries take the last ones.
        decay: ``[R]`` float32.
    """
    row, head, layer = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS, tl.program_id(2)
    queries_of_row, live = tl.load(num_queries + row), tl.load(num_live + row)
    start = pinned_tokens + tl.program_id(0) * TILE_SLOTS
    if start >= live:
        return
    slots = start + tl.arange(0, TILE_SLOTS)
    queries = _queries(query_ptrs, layer, QUERY_TYPE, IN_TABLE)
    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(KEY_TYPE))
    scale = tl.load(scales + layer)
    row_table = table + row * table_stride
    first = tl.load(first_query + row)
    k = _key_tile(
        keys, row_table, head, slots, live,
        key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
        BLOCK_SIZE, HEAD_SIZE, PADDED_SIZE,
    ).to(DOT_TYPE)  # fmt: skip
    num_rows = queries_of_row * GROUP
    before = live - queries_of_row  # tokens that every query sees
    # The first query that sees any of these slots, at the beginning of its tile.
    first_m = tl.maximum(0, start - before) * GROUP // TILE_QUERIES * TILE_QUERIES
    lse_row = lse + layer * lse_stride_layer + tl.load(lse_start + row).to(tl.int64) * lse_stride_query
    row_weights = weights + num_weights - queries_of_row
    sums = tl.zeros((TILE_QUERIES, TILE_SLOTS), tl.float32)
    for m0 in range(first_m, num_rows, TILE_QUERIES):
        m = m0 + tl.arange(0, TILE_QUERIES)
        q = _query_tile(
            queries, query_stride_token, query_stride_head, first, m, num_rows, head,
            GROUP, HEAD_SIZE, PADDED_SIZE,
        ).to(DOT_TYPE)  # fmt: skip
        logits = _logits(q, k, scale, before + m // GROUP + 1, slots, SOFTCAP)
        there = m < num_rows
        at = lse_row + (m // GROUP).to(tl.int64) * lse_stride_query + head * GROUP + m % GROUP
        # +inf makes the probabilities of rows behind the last zero.
        denominator = tl.load(at, mask=there, other=float("inf"))
        weight = tl.load(row_weights + m // GROUP, mask=there, other=0.0)
        sums += tl.exp2(logits - denominator[:, None]) * weight[:, None]
    live_slots = slots < live
    blocks = tl.load(row_table + slots // BLOCK_SIZE, mask=live_slots, other=0).to(tl.int64)
    scores = tl.load(score_ptrs + layer).to(tl.pointer_type(tl.float32))
    at = scores + blocks * score_stride_block + head * score_stride_head + slots % BLOCK_SIZE
    old = tl.load(at, mask=live_slots, other=0.0)
    tl.store(at, old * tl.load(decay + row) + tl.sum(sums, 0), mask=live_slots)


@triton.jit(do_not_specialize=VARYING)
def keep_queries_kernel(
    query, ring, slots, query_stride_token, ring_stride_slot,
    WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tokens, tiles of WIDTH)``: copies query ``i`` to ``ring[slots[i]]``; -1 keeps none.

    Inside a CUDA graph ``slots`` is a buffer that stays, so a replay keeps what the step says.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = i < WIDTH
    value = tl.load(query + token.to(tl.int64) * query_stride_token + i, mask=there)
    tl.store(ring + slot.to(tl.int64) * ring_stride_slot + i, value, mask=there)
