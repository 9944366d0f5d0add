"""The layout of vLLM's AMX attention: whatever is done to a cache gives the same as in the other layout.

What that one has to give is checked against the reference elsewhere. On machines without AMX the native
kernels read the same layout with other instructions; so they do everywhere at head sizes like 48.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paged import ALL_KERNELS, COMPILED, MakeKernels, Pages, Row, Shape, raw_bytes, run_drops, run_scores
from vllm_h2o.config import RANKS, RankBy
from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.kernels.plain.prepare import PlainKernels

pytestmark = pytest.mark.skipif("native" not in COMPILED, reason="a layout of CPUs")

MAKE: dict[str, MakeKernels] = {**COMPILED, "torch": PlainKernels}
ATTENTION = {
    "plain": AttentionShape(0.2),
    "softcap": AttentionShape(0.3, softcap=0.9),
    "sinks": AttentionShape(0.2, sinks=torch.linspace(-2, 3, 12)),
}


def tiled(pages: Pages) -> Pages:
    """A copy in the AMX layout."""
    shape = replace(pages.shape, isa="amx")
    other = Pages(shape, 0)
    keys, values = pages.layer.keys, pages.layer.values
    # Named dimension by dimension, in the order of memory.
    blocks, heads, size, slots = keys.shape
    memory = other.cache.view(blocks, heads, 2, slots * size)
    memory[:, :, 0] = (
        keys.reshape(blocks, heads, size // 2, 2, slots // 16, 16).permute(0, 1, 4, 2, 5, 3).flatten(2)
    )
    memory[:, :, 1] = (
        values.reshape(blocks, heads, slots // 2, 2, size // 16, 16).permute(0, 1, 4, 2, 5, 3).flatten(2)
    )
    other.layer.scores.copy_(pages.layer.scores)
    if pages.layer.positions is not None:
        assert other.layer.positions is not None
        other.layer.positions.copy_(pages.layer.positions)
    return other


def filled(
    head_size: int, block_size: int, live: Sequence[int], *, positions: bool = False
) -> tuple[Pages, list[Row]]:
    shape = Shape(
        num_blocks=30,
        num_kv_heads=3,
        block_size=block_size,
        head_size=head_size,
        dtype=torch.bfloat16,
        positions=positions,
    )
    pages = Pages(shape, seed=head_size + block_size)
    rows = [pages.add_row(num_live) for num_live in live]
    for row in rows:
        for head in range(shape.num_kv_heads):
            scores = torch.rand(row.num_live, generator=pages.generator)
            pages.put(pages.layer.scores, row, head, scores)
    return pages, rows


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("head_size", "block_size", "group"), [(64, 32, 3), (32, 64, 1), (160, 32, 4), (48, 32, 2)]
)
@pytest.mark.parametrize("from_ring", [False, True])
def test_scores_are_the_same(
    kernels: str, attention: str, head_size: int, block_size: int, group: int, from_ring: bool
) -> None:
    live = [5, 45, 32, 150] if from_ring else [1, 97, 130]
    pages, rows = filled(head_size, block_size, live)
    counts = [4, 12, 31, 21] if from_ring else [1, 60, 130]
    firsts = [block_size * i + 1 for i in range(len(live))]
    firsts = firsts if from_ring else [2, 10, 75]
    queries = pages.random(8 * block_size, 3 * group, head_size)
    shape = ATTENTION[attention]
    if shape.sinks is not None:
        shape = replace(shape, sinks=shape.sinks[: 3 * group].contiguous())
    other = tiled(pages)
    cache = raw_bytes(other.cache).clone()
    untouched = other.layer.scores.clone()
    options = {"from_ring": from_ring, "pinned_blocks": 1, "half_life": 9.0}
    for each in (pages, other):
        run_scores(each, queries, queries, rows, firsts, counts, shape, make=MAKE[kernels], **options)
    torch.testing.assert_close(other.layer.scores, pages.layer.scores, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not torch.equal(other.layer.scores.nan_to_num(7), untouched.nan_to_num(7))
    other.layer.scores.copy_(untouched)
    assert torch.equal(raw_bytes(other.cache), cache)


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("rank_by", RANKS)
@pytest.mark.parametrize("score_pool", [1, 5])
@pytest.mark.parametrize(("head_size", "block_size"), [(64, 32), (32, 64), (48, 32)])
def test_the_same_tokens_move(
    kernels: str, rank_by: RankBy, score_pool: int, head_size: int, block_size: int
) -> None:
    pages, rows = filled(head_size, block_size, [220, 150, 290], positions=True)
    order = random.Random(3)
    assert pages.layer.positions is not None
    for row in rows:
        middle = list(range(block_size, row.num_live - 9))
        order.shuffle(middle)
        positions = torch.tensor([*range(block_size), *middle, *range(row.num_live - 9, row.num_live)])
        pages.put(pages.layer.positions, row, 1, positions)
    other, untouched = tiled(pages), raw_bytes(pages.cache).clone()
    for each in (pages, other):
        run_drops(
            each,
            rows,
            [2 * block_size, block_size, 3 * block_size],
            pinned_tokens=block_size,
            recent_tokens=9,
            score_pool=score_pool,
            rank_by=rank_by,
            total_weights=[float(n) for n in range(1, 300)],
            make=MAKE[kernels],
        )
    # The oldest go from where they are, and nobody moves.
    assert rank_by == "age" or not torch.equal(raw_bytes(pages.cache), untouched)
    assert torch.equal(raw_bytes(other.cache), raw_bytes(tiled(pages).cache))
