"""What tokens rank by when some have to go, on a GPU (``vllm_h2o/kernels/plain/ranks.py`` says what and why).

All kernels here work on *pieces*: one (layer, row, KV head) each, ``P = L * R * H`` of them, numbered in that
order. What they pass on lies in scratch memory of one line per piece.

Pooling needs neighbours in the text, and slots are in no order once tokens have moved. A sort would cost more
than everything else; instead each piece marks the positions of its tokens in a bitmap, and a token's age is
the number of bits below its own.
"""

import triton
import triton.language as tl

from vllm_h2o.kernels.triton import VARYING

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _piece(NUM_KV_HEADS: tl.constexpr):
    """Row, head, layer and number of this program's piece; axis 1 is rows times heads, axis 2 layers."""
    row, head = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS
    layer = tl.program_id(2)
    return row, head, layer, (layer * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)


@triton.jit
def _positions(
    position_ptrs, table, layer, head, slots, there, stride_block, stride_head, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """Positions of the tokens at ``slots`` of a row and head."""
    blocks = tl.load(table + slots // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    positions = tl.load(position_ptrs + layer).to(tl.pointer_type(tl.int32))
    at = positions + blocks * stride_block + head * stride_head + slots % BLOCK_SIZE
    return tl.load(at, mask=there, other=0)


@triton.jit
def _ones(words):
    """How many bits of each int32 are set."""
    x = words.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=VARYING)
def mean_key_kernel(
    key_ptrs, anchors, num_live, table,
    key_stride_block, key_stride_head, key_stride_dim, key_stride_slot, table_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_TYPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(1, R * H, L)``: direction of the mean of a piece's normalised keys, ``[P, PADDED_SIZE]``."""
    row, head, layer, piece = _piece(NUM_KV_HEADS)
    live = tl.load(num_live + row)
    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(KEY_TYPE)) + head * key_stride_head
    d = tl.arange(0, PADDED_SIZE)
    total = tl.zeros((PADDED_SIZE,), tl.float32)
    for start in range(0, live, TILE):
        slots = start + tl.arange(0, TILE)
        blocks = tl.load(table + row * table_stride + slots // BLOCK_SIZE, mask=slots < live, other=0)
        at = keys + blocks.to(tl.int64) * key_stride_block + (slots % BLOCK_SIZE) * key_stride_slot
        there = (slots < live)[:, None] & (d < HEAD_SIZE)[None, :]
        k = tl.load(at[:, None] + d[None, :] * key_stride_dim, mask=there, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(k * k, 1)), 1e-12)
        total += tl.sum(k / norm[:, None], 0)
    norm = tl.maximum(tl.sqrt(tl.sum(total * total, 0)), 1e-12)
    tl.store(anchors + piece * PADDED_SIZE + d, total / norm)


@triton.jit(do_not_specialize=VARYING)
def rank_tokens_kernel(
    key_ptrs, value_ptrs, score_ptrs, position_ptrs, anchors, total_weights,
    ranks, num_live, num_tokens, table,
    key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot, value_stride_dim,
    score_stride_block, score_stride_head, table_stride, width,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_TYPE: tl.constexpr, RANK_BY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of slots, R * H, L)``: ``ranks [P, width]`` float32 by slot, finite.

    Args:
        total_weights: ``[max_model_len]`` float32, only for ``mean``.
        RANK_BY: one of ``vllm_h2o.config.RANKS``.
    """
    row, head, layer, piece = _piece(NUM_KV_HEADS)
    live = tl.load(num_live + row)
    start = tl.program_id(0) * TILE
    if start >= live:
        return
    slots = start + tl.arange(0, TILE)
    there = slots < live
    blocks = tl.load(table + row * table_stride + slots // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    offsets = slots % BLOCK_SIZE
    side = blocks * score_stride_block + head * score_stride_head + offsets
    d = tl.arange(0, PADDED_SIZE)
    dims = there[:, None] & (d < HEAD_SIZE)[None, :]
    scores = tl.load(score_ptrs + layer).to(tl.pointer_type(tl.float32))
    if RANK_BY == "age":
        rank = tl.zeros((TILE,), tl.float32)
    elif RANK_BY == "keys":
        keys = tl.load(key_ptrs + layer).to(tl.pointer_type(KEY_TYPE))
        at = keys + blocks * key_stride_block + head * key_stride_head + offsets * key_stride_slot
        k = tl.load(at[:, None] + d[None, :] * key_stride_dim, mask=dims, other=0.0).to(tl.float32)
        norm = tl.maximum(tl.sqrt(tl.sum(k * k, 1)), 1e-12)
        anchor = tl.load(anchors + piece * PADDED_SIZE + d)
        rank = 1 - tl.sum(k / norm[:, None] * anchor[None, :], 1)
    else:
        rank = tl.load(scores + side, mask=there, other=0.0)
        if RANK_BY == "value":
            values = tl.load(value_ptrs + layer).to(tl.pointer_type(KEY_TYPE))
            at = values + blocks * value_stride_block + head * value_stride_head + offsets * value_stride_slot
            v = tl.load(at[:, None] + d[None, :] * value_stride_dim, mask=dims, other=0.0).to(tl.float32)
            rank = rank * tl.sum(tl.abs(v), 1)
        if RANK_BY == "mean":
            positions = tl.load(position_ptrs + layer).to(tl.pointer_type(tl.int32))
            position = tl.load(positions + side, mask=there, other=0)
            seen_by = tl.load(num_tokens + row) - position
            rank = rank / tl.load(total_weights + seen_by - 1, mask=there, other=1.0)
    # A model that produced NaN must not make us drop what is pinned, and infinities must stay comparable.
    rank = tl.where(rank != rank, FLOAT_MAX, tl.minimum(tl.maximum(rank, -FLOAT_MAX), FLOAT_MAX))
    tl.store(ranks + piece * width + slots, tl.where(rank == 0, 0.0, rank), mask=there)  # -0 ties with 0


@triton.jit(do_not_specialize=VARYING)
def mark_positions_kernel(
    position_ptrs, bitmap, num_live, table,
    score_stride_block, score_stride_head, table_stride, num_words,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of slots, R * H, L)``: sets the bits of a piece's positions, ``[P, num_words]``."""
    row, head, layer, piece = _piece(NUM_KV_HEADS)
    slots = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = slots < tl.load(num_live + row)
    position = _positions(
        position_ptrs, table + row * table_stride, layer, head, slots, there,
        score_stride_block, score_stride_head, BLOCK_SIZE,
    )  # fmt: skip
    bit = (tl.full((TILE,), 1, tl.uint32) << (position % 32).to(tl.uint32)).to(tl.int32, bitcast=True)
    tl.atomic_or(bitmap + piece * num_words + position // 32, bit, mask=there)


@triton.jit(do_not_specialize=VARYING)
def count_below_kernel(bitmap, below, num_words, NUM_KV_HEADS: tl.constexpr, TILE: tl.constexpr) -> None:
    """Grid ``(1, R * H, L)``: bits in the words before each one, ``below [P, num_words]`` int32."""
    _, _, _, piece = _piece(NUM_KV_HEADS)
    total = 0
    for start in range(0, num_words, TILE):
        words = start + tl.arange(0, TILE)
        ones = _ones(tl.load(bitmap + piece * num_words + words, mask=words < num_words, other=0))
        tl.store(below + piece * num_words + words, total + tl.cumsum(ones, 0) - ones, mask=words < num_words)
        total += tl.sum(ones, 0)


@triton.jit(do_not_specialize=VARYING)
def order_by_age_kernel(
    position_ptrs, bitmap, below, ranks, slot_of_age, aged, num_live, table,
    score_stride_block, score_stride_head, table_stride, num_words, width,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of slots, R * H, L)``: by age, ``slot_of_age`` and ``aged``, ``[P, width]``."""
    row, head, layer, piece = _piece(NUM_KV_HEADS)
    slots = tl.program_id(0) * TILE + tl.arange(0, TILE)
    there = slots < tl.load(num_live + row)
    position = _positions(
        position_ptrs, table + row * table_stride, layer, head, slots, there,
        score_stride_block, score_stride_head, BLOCK_SIZE,
    )  # fmt: skip
    word = piece * num_words + position // 32
    lower = (tl.full((TILE,), 1, tl.uint32) << (position % 32).to(tl.uint32)) - 1
    lower_bits = tl.load(bitmap + word, mask=there, other=0) & lower.to(tl.int32, bitcast=True)
    age = tl.load(below + word, mask=there, other=0) + _ones(lower_bits)
    rank = tl.load(ranks + piece * width + slots, mask=there, other=0.0)
    tl.store(slot_of_age + piece * width + age, slots, mask=there)
    tl.store(aged + piece * width + age, rank, mask=there)


@triton.jit(do_not_specialize=VARYING)
def pool_ranks_kernel(
    aged, slot_of_age, ranks, num_live, pinned_tokens, width,
    NUM_KV_HEADS: tl.constexpr, POOL: tl.constexpr, BY_SLOT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of ages, R * H, L)``: each token's highest rank among its neighbours, ``[P, width]``.

    By age, or by slot. Pinned tokens are the oldest and may be shared: they keep no scores and don't count.
    """
    row, _, _, piece = _piece(NUM_KV_HEADS)
    live, pinned = tl.load(num_live + row), tl.load(pinned_tokens + row)
    ages = tl.program_id(0) * TILE + tl.arange(0, TILE)
    most = tl.full((TILE,), float("-inf"), tl.float32)
    for step in tl.static_range(POOL):
        near = ages + step - POOL // 2
        counts = (near >= pinned) & (near < live)
        most = tl.maximum(most, tl.load(aged + piece * width + near, mask=counts, other=float("-inf")))
    there = ages < live
    to = ages
    if BY_SLOT:
        to = tl.load(slot_of_age + piece * width + ages, mask=there, other=0)
    tl.store(ranks + piece * width + to, most, mask=there)
