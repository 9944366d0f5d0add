"""What tokens rank by, tensor operations and native kernels, against the plain statement."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from paged import COMPILED, Pages, Row, Shape, compaction, raw_bytes, run_drops, run_plan, total_tokens
from vllm_h2o.config import RANKS, RankBy
from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.kernels.plain.compaction import compact
from vllm_h2o.kernels.plain.ranks import drawn_scores, token_ranks
from vllm_h2o.step_plan import StepPlan

LIMITS = {"pinned_tokens": 4, "recent_tokens": 3}
LIVE = [13, 22, 18]
TOTAL_WEIGHTS = np.cumsum(0.5 ** (np.arange(64) / 9.0)).astype(np.float32)


def set_up(dtype: torch.dtype, seed: int) -> tuple[Pages, list[Row]]:
    """Rows of random tokens, whose order in the slots is not their age."""
    pages = Pages(Shape(dtype=dtype, positions=True), seed)
    rows = [pages.add_row(num_live) for num_live in LIVE]
    for row in rows:
        for head in range(pages.shape.num_kv_heads):
            pages.put(pages.layer.scores, row, head, torch.rand(row.num_live, generator=pages.generator) * 4)
            # Pinned tokens are always the oldest, and recent ones the newest.
            first, stop = LIMITS["pinned_tokens"], row.num_live - LIMITS["recent_tokens"]
            order = torch.arange(row.num_live)
            order[first:stop] = order[first:stop][torch.randperm(stop - first, generator=pages.generator)]
            assert pages.layer.positions is not None
            pages.put(pages.layer.positions, row, head, order)
    return pages, rows


def expected(pages: Pages, row: Row, head: int, rank_by: RankBy) -> list[float]:
    layer = pages.layer
    assert layer.positions is not None
    scores = pages.get(layer.scores, row, head).tolist()
    if rank_by == "mean":
        positions = pages.get(layer.positions, row, head).tolist()
        return reference.mean_ranks(scores, positions, total_tokens(row), half_life=9.0)
    if rank_by == "value":
        return reference.value_ranks(scores, pages.get(layer.values, row, head).double().tolist())
    if rank_by == "keys":
        return reference.key_ranks(pages.keys(row, head).double().tolist())
    return [0.0] * row.num_live if rank_by == "age" else scores


@pytest.mark.parametrize("rank_by", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_equal_the_reference(rank_by: RankBy, dtype: torch.dtype, seed: int) -> None:
    pages, rows = set_up(dtype, seed)
    plan = compaction(
        rows, [4] * len(rows), 4, **LIMITS, rank_by=rank_by, total_weights=TOTAL_WEIGHTS.tolist()
    )
    positions = pages.layer.positions
    assert positions is not None
    by_slot = positions[plan.blocks].transpose(1, 2).flatten(2)
    got = token_ranks(pages.layer, plan.blocks, plan.live, plan.rule, by_slot)
    for r, row in enumerate(rows):
        for head in range(pages.shape.num_kv_heads):
            want = expected(pages, row, head, rank_by)
            assert got[r, head, : row.num_live].tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rank_by", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("score_pool", [1, 3])
@pytest.mark.parametrize("kernels", COMPILED)
def test_compiled_kernels_drop_the_same(
    kernels: str, rank_by: RankBy, dtype: torch.dtype, by_block: bool, score_pool: int
) -> None:
    plain, rows = set_up(dtype, seed=3)
    compiled, before = plain.copy(), plain.copy()
    options = {**LIMITS, "by_block": by_block, "score_pool": score_pool, "rank_by": rank_by}
    dropped = [4, 8, 4]
    compact(plain.layer, compaction(rows, dropped, 4, **options, total_weights=TOTAL_WEIGHTS.tolist()))
    run_drops(compiled, rows, dropped, **options, total_weights=TOTAL_WEIGHTS, make=COMPILED[kernels])
    assert torch.equal(raw_bytes(compiled.cache), raw_bytes(plain.cache))
    if rank_by != "age":
        assert not torch.equal(raw_bytes(plain.cache), raw_bytes(before.cache))


def test_by_age_nothing_moves() -> None:
    """The oldest tokens lie in the freed blocks as long as nothing else ever moved them."""
    pages = Pages(Shape(), seed=4)
    rows = [pages.add_row(22)]
    before = raw_bytes(pages.cache).clone()
    run_drops(pages, rows, [8], **LIMITS, rank_by="age")
    compact(pages.layer, compaction(rows, [8], 4, **LIMITS, rank_by="age"))
    assert torch.equal(raw_bytes(pages.cache), before)


@pytest.mark.parametrize("kernels", COMPILED)
def test_drawn_scores_equal_the_reference(kernels: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3], [100_000, 100_001, 7, 2**31 - 1]], dtype=torch.int32)
    want = [
        [[reference.drawn_rank(p, 5, head, 2) for p in block] for head in range(2)]
        for block in positions.tolist()
    ]
    assert drawn_scores(positions, num_kv_heads=2, salt=5).tolist() == want
    pages = Pages(Shape(), seed=5)
    plan = StepPlan(started_blocks=np.array([3, 9]), started_positions=positions.numpy())
    nothing = torch.empty(0, 2, 8)
    run_plan(
        pages, plan, nothing, nothing, AttentionShape(1.0), pinned_tokens=0, rank_by="random", name="random",
        layer_name="model.layers.5.self_attn.attn", make=COMPILED[kernels],
    )  # fmt: skip
    assert pages.layer.scores[[3, 9]].tolist() == want


def test_drawn_scores_look_random() -> None:
    drawn = drawn_scores(torch.arange(4096, dtype=torch.int32).view(-1, 4), num_kv_heads=3, salt=2)
    by_head = drawn.transpose(0, 1).flatten(1).double()
    assert by_head.mean(dim=1).tolist() == pytest.approx([0.5] * 3, abs=0.02)
    assert by_head.std(dim=1).tolist() == pytest.approx([12**-0.5] * 3, abs=0.02)
    # Neither between heads nor between neighbours nor between layers.
    other = drawn_scores(torch.arange(4096, dtype=torch.int32).view(-1, 4), num_kv_heads=3, salt=3)
    rows = torch.stack([*by_head, by_head[0].roll(1), other.transpose(0, 1).flatten(1)[0].double()])
    correlation = torch.corrcoef(rows) - torch.eye(len(rows), dtype=torch.float64)
    assert correlation.abs().max() < 0.06
