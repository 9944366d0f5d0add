"""In-place compaction on a GPU: which tokens go, and what moves where.

``vllm_h2o/kernels/plain/compaction.py`` says what and why; pieces and scratch memory are as in ``ranks.py``.
Choosing takes no sort: the rank of the last token to go is found bit by bit, in 32 counts over a piece's
ranks, which stay in the multiprocessor's cache.
"""

import triton
import triton.language as tl

from vllm_h2o.kernels.triton import VARYING
from vllm_h2o.kernels.triton.ranks import FLOAT_MAX, _piece


@triton.jit(do_not_specialize=VARYING)
def sum_blocks_kernel(
    ranks, block_ranks, num_live, width,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of blocks, R * H, L)``: ranks of whole blocks, ``[P, width // BLOCK_SIZE]``."""
    row, _, _, piece = _piece(NUM_KV_HEADS)
    blocks = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    slots = blocks[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    live = tl.load(num_live + row)
    sums = tl.sum(tl.load(ranks + piece * width + slots, mask=slots < live, other=0.0), 1)
    sums = tl.minimum(tl.maximum(sums, -FLOAT_MAX), FLOAT_MAX)
    tl.store(block_ranks + piece * (width // BLOCK_SIZE) + blocks, sums, mask=blocks * BLOCK_SIZE < live)


@triton.jit
def _ordered(ranks):
    """uint32 that compare as the floats do."""
    bits = ranks.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _count_lower(ranks, begin, end, limit, TILE: tl.constexpr):
    """How many of ``ranks[begin:end]`` are below ``limit``."""
    lower = tl.zeros((TILE,), tl.int32)
    for start in range(begin, end, TILE):
        i = start + tl.arange(0, TILE)
        key = _ordered(tl.load(ranks + i, mask=i < end, other=0.0))
        lower += ((key < limit) & (i < end)).to(tl.int32)
    return tl.sum(lower, 0)


@triton.jit(do_not_specialize=VARYING)
def select_lowest_kernel(
    ranks, slot_of_age, victims, num_live, num_dropped, pinned_tokens,
    width, recent_tokens,
    NUM_KV_HEADS: tl.constexpr, UNIT: tl.constexpr, BY_AGE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(1, R * H, L)``: marks the lowest eligible units; among equals the first go.

    Args:
        ranks: ``[P, width]`` float32, of units of ``UNIT`` slots, in slot order or by age.
        victims: ``[P, width]`` int8, by slot (or block); written where a unit is eligible.
    """
    row, _, _, piece = _piece(NUM_KV_HEADS)
    begin = tl.load(pinned_tokens + row) // UNIT
    end = (tl.load(num_live + row) - recent_tokens) // UNIT
    wanted = tl.load(num_dropped + row) // UNIT
    ranks += piece * width
    last = tl.full((), 0, tl.uint32)  # becomes the highest rank that goes
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        if _count_lower(ranks, begin, end, last | bit, TILE) < wanted:
            last |= bit
        bit >>= 1
    ties = wanted - _count_lower(ranks, begin, end, last, TILE)
    for start in range(begin, end, TILE):
        i = start + tl.arange(0, TILE)
        there = i < end
        key = _ordered(tl.load(ranks + i, mask=there, other=0.0))
        equal = ((key == last) & there).to(tl.int32)
        goes = (key < last) | ((equal > 0) & (tl.cumsum(equal, 0) <= ties))
        ties -= tl.sum(equal, 0)
        to = i
        if BY_AGE:
            to = tl.load(slot_of_age + piece * width + i, mask=there, other=0)
        tl.store(victims + piece * width + to, goes.to(tl.int8), mask=there)


@triton.jit(do_not_specialize=VARYING)
def pair_moves_kernel(
    victims, sources, targets, num_moves, num_live, num_dropped, pinned_tokens,
    victim_width, move_width, recent_tokens,
    NUM_KV_HEADS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(1, R * H, L)``: the i-th survivor of the region to be freed, and the i-th hole outside of it.

    Args:
        sources, targets: ``[P, move_width]`` int32 slots.
        num_moves: ``[P]`` int32.
    """
    row, _, _, piece = _piece(NUM_KV_HEADS)
    begin = tl.load(pinned_tokens + row)
    freed_end = begin + tl.load(num_dropped + row)
    end = (tl.load(num_live + row) - recent_tokens) // UNIT * UNIT
    survivors, holes = 0, 0
    for start in range(begin, end, TILE):
        slots = start + tl.arange(0, TILE)
        there = slots < end
        goes = tl.load(victims + piece * victim_width + slots // UNIT, mask=there, other=0) != 0
        leaves = (there & (slots < freed_end) & (goes == 0)).to(tl.int32)
        hole = (there & (slots >= freed_end) & goes).to(tl.int32)
        moves = piece * move_width
        tl.store(sources + moves + survivors + tl.cumsum(leaves, 0) - leaves, slots, mask=leaves > 0)
        tl.store(targets + moves + holes + tl.cumsum(hole, 0) - hole, slots, mask=hole > 0)
        survivors += tl.sum(leaves, 0)
        holes += tl.sum(hole, 0)
    tl.store(num_moves + piece, survivors)


@triton.jit(do_not_specialize=VARYING)
def move_tokens_kernel(
    key_ptrs, value_ptrs, score_ptrs, position_ptrs,
    sources, targets, num_moves, table,
    key_stride_block, key_stride_head, key_stride_dim, key_stride_slot,
    value_stride_block, value_stride_head, value_stride_slot, value_stride_dim,
    score_stride_block, score_stride_head, table_stride, move_width,
    NUM_KV_HEADS: tl.constexpr, HEAD_SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ELEMENT_TYPE: tl.constexpr, HAS_POSITIONS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid ``(tiles of moves, R * H, L)``: copies K, V, score and position of every pair.

    Args:
        ELEMENT_TYPE: any type of the cache's element size: bits are copied.
    """
    row, head, layer, piece = _piece(NUM_KV_HEADS)
    count = tl.load(num_moves + piece)
    first = tl.program_id(0) * TILE
    if first >= count:
        return
    i = first + tl.arange(0, TILE)
    there = i < count
    source = tl.load(sources + piece * move_width + i, mask=there, other=0)
    target = tl.load(targets + piece * move_width + i, mask=there, other=0)
    row_table = table + row * table_stride
    from_block = tl.load(row_table + source // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    to_block = tl.load(row_table + target // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    from_offset, to_offset = source % BLOCK_SIZE, target % BLOCK_SIZE
    d = tl.arange(0, PADDED_SIZE)
    dims = there[:, None] & (d < HEAD_SIZE)[None, :]
    keys = tl.load(key_ptrs + layer).to(tl.pointer_type(ELEMENT_TYPE)) + head * key_stride_head
    at = from_block * key_stride_block + from_offset * key_stride_slot
    to = to_block * key_stride_block + to_offset * key_stride_slot
    k = tl.load(keys + at[:, None] + d[None, :] * key_stride_dim, mask=dims)
    tl.store(keys + to[:, None] + d[None, :] * key_stride_dim, k, mask=dims)
    values = tl.load(value_ptrs + layer).to(tl.pointer_type(ELEMENT_TYPE)) + head * value_stride_head
    at = from_block * value_stride_block + from_offset * value_stride_slot
    to = to_block * value_stride_block + to_offset * value_stride_slot
    v = tl.load(values + at[:, None] + d[None, :] * value_stride_dim, mask=dims)
    tl.store(values + to[:, None] + d[None, :] * value_stride_dim, v, mask=dims)
    at = from_block * score_stride_block + head * score_stride_head + from_offset
    to = to_block * score_stride_block + head * score_stride_head + to_offset
    scores = tl.load(score_ptrs + layer).to(tl.pointer_type(tl.float32))
    tl.store(scores + to, tl.load(scores + at, mask=there), mask=there)
    if HAS_POSITIONS:
        positions = tl.load(position_ptrs + layer).to(tl.pointer_type(tl.int32))
        tl.store(positions + to, tl.load(positions + at, mask=there), mask=there)


@triton.jit(do_not_specialize=VARYING)
def start_blocks_kernel(
    score_ptrs, position_ptrs, salts, started, started_positions,
    score_stride_block, score_stride_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_POSITIONS: tl.constexpr, DRAWS: tl.constexpr,
):  # fmt: skip
    """Grid ``(started blocks, H, L)``: resets scores, or draws them (``drawn_scores``), and sets positions.

    Args:
        started: ``[n]`` int32 block ids.
        started_positions: ``[n, BLOCK_SIZE]`` int32, of the tokens that its slots will hold.
        salts: ``[L]`` int32, tell layers apart.
    """
    block = tl.load(started + tl.program_id(0)).to(tl.int64)
    head, layer = tl.program_id(1), tl.program_id(2)
    offsets = tl.arange(0, BLOCK_SIZE)
    position = tl.load(started_positions + tl.program_id(0) * BLOCK_SIZE + offsets)
    at = block * score_stride_block + head * score_stride_head + offsets
    score = tl.zeros((BLOCK_SIZE,), tl.float32)
    if DRAWS:
        salted = (head + tl.load(salts + layer) * NUM_KV_HEADS).to(tl.uint32)
        x = position.to(tl.uint32) * 0x9E3779B1 + salted * 0x85EBCA77
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 16)) * 0x846CA68B
        score = ((x ^ (x >> 16)) >> 8).to(tl.float32) / 16777216.0
    tl.store(tl.load(score_ptrs + layer).to(tl.pointer_type(tl.float32)) + at, score)
    if HAS_POSITIONS:
        tl.store(tl.load(position_ptrs + layer).to(tl.pointer_type(tl.int32)) + at, position)
