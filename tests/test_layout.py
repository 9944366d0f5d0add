"""The views are vLLM's own memory: what its kernels write is what we read, and nothing overlaps."""

from __future__ import annotations

import pytest
import torch

from paged import Shape, padded_cache, raw_bytes
from vllm_h2o.layout import PagedLayer, side_bytes_per_block

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("spare_bytes", "offset_bytes"), [(0, 0), (64, 0), (0, 128)])
def test_views_alias_disjoint_parts_of_the_cache(
    positions: bool, dtype: torch.dtype, spare_bytes: int, offset_bytes: int
) -> None:
    shape = Shape(num_blocks=5, num_kv_heads=3, dtype=dtype, positions=positions)
    cache = padded_cache(shape, spare_bytes=spare_bytes, offset_bytes=offset_bytes)
    layer = PagedLayer.from_cpu_cache(cache, isa="vec", positions=positions)
    views = {"keys": layer.keys, "values": layer.values, "scores": layer.scores}
    if positions:
        assert layer.positions is not None
        views["positions"] = layer.positions
    else:
        assert layer.positions is None
    memory = raw_bytes(cache)
    owner = torch.zeros_like(memory)
    for number, view in enumerate(views.values(), start=1):
        memory.zero_()
        view.view(torch.int16 if view.element_size() == 2 else torch.int32).fill_(-1)
        written = memory != 0
        assert int(written.sum()) == view.numel() * view.element_size()
        assert not owner[written].any()
        owner[written] = number
    assert int((owner == 0).sum()) == offset_bytes + spare_bytes * shape.num_blocks
    # A block's bytes are contiguous and hold all of it, so that copying a block copies its scores.
    pages = owner[offset_bytes:].view(shape.num_blocks, -1)
    assert (pages == pages[0]).all()
    assert set(pages[0].tolist()) - {0} == set(range(1, len(views) + 1))


def test_shapes_and_types_are_those_promised() -> None:
    shape = Shape(
        num_blocks=5, num_kv_heads=3, block_size=4, head_size=8, dtype=torch.bfloat16, positions=True
    )
    layer = PagedLayer.from_cpu_cache(padded_cache(shape), isa="vec", positions=True)
    assert layer.positions is not None
    assert layer.block_size == 4
    assert (layer.keys.shape, layer.keys.dtype) == ((5, 3, 8, 4), torch.bfloat16)
    assert (layer.values.shape, layer.values.dtype) == ((5, 3, 4, 8), torch.bfloat16)
    assert (layer.scores.shape, layer.scores.dtype) == ((5, 3, 4), torch.float32)
    assert (layer.positions.shape, layer.positions.dtype) == ((5, 3, 4), torch.int32)


def test_side_bytes_by_hand() -> None:
    assert side_bytes_per_block(3, 32, positions=False) == 3 * 32 * 4
    assert side_bytes_per_block(3, 32, positions=True) == 3 * 32 * 8


@pytest.mark.parametrize("positions", [False, True])
def test_blocks_without_room_are_refused(positions: bool) -> None:
    cache = padded_cache(Shape(positions=positions), spare_bytes=-4)
    with pytest.raises(AssertionError, match="no room"):
        PagedLayer.from_cpu_cache(cache, isa="vec", positions=positions)


@pytest.mark.parametrize("positions", [False, True])
def test_starting_blocks_resets_them_and_no_other(positions: bool) -> None:
    shape = Shape(num_blocks=6, positions=positions)
    cache = padded_cache(shape)
    layer = PagedLayer.from_cpu_cache(cache, isa="vec", positions=positions)
    cache.fill_(1.5)
    layer.scores.fill_(torch.nan)
    if layer.positions is not None:
        layer.positions.fill_(-7)
    ids, tokens = torch.tensor([4, 1]), torch.tensor([[8, 9, 10, 11], [0, 1, 2, 3]], dtype=torch.int32)
    layer.start_blocks(ids, tokens)
    untouched = [0, 2, 3, 5]
    assert (layer.scores[ids] == 0).all()
    assert layer.scores[untouched].isnan().all()
    assert (cache == 1.5).all()
    if layer.positions is not None:
        # Every head starts with the same tokens.
        assert torch.equal(layer.positions[ids], tokens[:, None].expand(2, shape.num_kv_heads, 4))
        assert (layer.positions[untouched] == -7).all()


# --- against vLLM's own writer --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize(
    ("isa", "block_size"), [("vec", 32), ("vec", 64), ("vec16", 16), ("vec16", 32), ("vec16", 64)]
)
def test_vllm_writes_where_the_views_read(
    isa: str, block_size: int, head_size: int, dtype: torch.dtype
) -> None:
    """vLLM picks vec16 for head sizes that aren't a multiple of 32; its writer takes either for all."""
    check_where_vllm_writes(isa, block_size, head_size, dtype)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM's AMX kernels need AMX")
@pytest.mark.parametrize("head_size", [32, 64, 96, 256])
@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_vllm_writes_tiles_where_the_views_read(block_size: int, head_size: int) -> None:
    check_where_vllm_writes("amx", block_size, head_size, torch.bfloat16)


def check_where_vllm_writes(isa: str, block_size: int, head_size: int, dtype: torch.dtype) -> None:
    from vllm import _custom_ops as ops

    shape = Shape(num_blocks=6, block_size=block_size, head_size=head_size, dtype=dtype, positions=True)
    cache = padded_cache(shape)
    layer = PagedLayer.from_cpu_cache(cache, isa=isa, positions=True)
    assert layer.positions is not None
    layer.scores.fill_(0.25)
    layer.positions.fill_(-1)
    generator = torch.Generator().manual_seed(0)
    # From the middle of one block over a whole block into the middle of a third, scattered.
    slots = torch.cat([torch.arange(b * block_size, (b + 1) * block_size) for b in (4, 1, 3)])
    slots = slots[block_size // 2 : -block_size // 2]
    key, value = torch.randn(
        (2, slots.numel(), shape.num_kv_heads, head_size), generator=generator, dtype=torch.float32
    ).to(dtype)
    # As vllm.v1.attention.backends.cpu_attn does it.
    halves = cache.view(shape.num_blocks, shape.num_kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        key, value, *halves, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
    )
    blocks, offsets = slots // block_size, slots % block_size
    every_block = torch.arange(shape.num_blocks)
    assert torch.equal(layer.keys_of(every_block)[blocks, :, :, offsets], key)
    assert torch.equal(layer.values_of(every_block)[blocks, :, offsets], value)
    # It wrote nothing else: neither other slots, nor scores and positions.
    assert int((cache != 0).sum()) == int((key != 0).sum()) + int((value != 0).sum())
    assert (layer.scores == 0.25).all()
    assert (layer.positions == -1).all()
