"""The Triton kernels beyond the tests that all kernels share: groups of layers, tiles, dtypes, errors.

Most need TRITON_INTERPRET=1, which `scripts/run_tests.py` sets for a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from paged import INTERPRETED, Pages, Row, Shape, compaction, padded_blocks, raw_bytes, run_drops, run_scores
from paged import triton_kernels as make
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import KernelError
from vllm_h2o.kernels.base import AttentionShape, LayerState
from vllm_h2o.kernels.plain.compaction import compact
from vllm_h2o.layout import PagedLayer
from vllm_h2o.step_plan import DropRows, ScoreRows, StepPlan

pytest.importorskip("triton")

from vllm_h2o.kernels.triton import drop_rows, score_rows
from vllm_h2o.kernels.triton.layers import LayerGroup

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")

SHAPE = Shape(num_blocks=60, num_kv_heads=2, block_size=16, head_size=24, positions=True)
CONFIG = KVPolicyConfig(
    name="h2o",
    block_size=16,
    budget_tokens=128,
    recent_tokens=16,
    pinned_blocks=1,
    granularity="token",
    score_half_life_tokens=None,
    score_pool=5,
    max_model_len=4096,
    max_in_flight_tokens=64,
    rank_by="value",
)
LIVE, DROPPED, PINNED = [200, 130, 333], [64, 16, 160], [16, 48, 0]


def filled(seed: int, shape: Shape = SHAPE) -> tuple[Pages, list[Row]]:
    """Rows whose tokens have scores, and are in no order between pinned and recent ones."""
    pages = Pages(shape, seed)
    rows = [pages.add_row(num_live) for num_live in LIVE]
    for row, pinned in zip(rows, PINNED, strict=True):
        for head in range(shape.num_kv_heads):
            pages.put(pages.layer.scores, row, head, torch.rand(row.num_live, generator=pages.generator))
            order = torch.arange(row.num_live) * 3  # as if others had been dropped between them
            middle = order[pinned:-16].clone()
            order[pinned:-16] = middle[torch.randperm(middle.numel(), generator=pages.generator)]
            assert pages.layer.positions is not None
            pages.put(pages.layer.positions, row, head, order)
    return pages, rows


def drops(rows: list[Row]) -> DropRows:
    live = np.array([row.num_live for row in rows])
    table = padded_blocks(rows).int().numpy()
    return DropRows(live, np.array(DROPPED), table, num_tokens=3 * live, pinned_tokens=np.array(PINNED))


def states(count: int) -> tuple[list[Pages], list[LayerState], list[Row]]:
    """Layers with other contents under the same block tables, as the layers of a model have them."""
    filled_layers = [filled(seed=0)]
    rows = filled_layers[0][1]
    for seed in range(1, count):
        pages = filled_layers[0][0].copy()
        torch.manual_seed(seed)
        pages.layer.keys.copy_(torch.randn(pages.layer.keys.shape))
        pages.layer.values.copy_(torch.randn(pages.layer.values.shape))
        filled_layers.append((pages, rows))
    all_pages = [pages for pages, _ in filled_layers]
    torch.manual_seed(99)
    return (
        all_pages,
        [
            LayerState(
                f"layers.{i}", pages.layer, torch.randn(64, 6, SHAPE.head_size), AttentionShape(0.2 + i / 10)
            )
            for i, pages in enumerate(all_pages)
        ],
        rows,
    )


@interpreted
def test_layers_in_one_launch_are_as_each_alone_triton() -> None:
    together, states_together, rows = states(3)
    alone, states_alone, _ = states(3)
    scored = ScoreRows(
        from_ring=np.full(3, True),
        first_query=np.array([0, 16, 35]),
        num_queries=np.array([16, 16, 13]),
        num_live=np.array(LIVE),
        live_table=padded_blocks(rows).int().numpy(),
        weights=np.linspace(0.5, 1, 16, dtype=np.float32),
        decay=np.array([0.5, 1, 0.25], dtype=np.float32),
    )
    cpu = torch.device("cpu")
    score = score_rows.ScoreWork.of(scored, CONFIG, cpu)
    drop = drop_rows.DropWork.of(drops(rows), CONFIG, cpu)
    group = LayerGroup.of(states_together)
    score.run(group, states_together[0].ring)
    drop.run(group)
    for state in states_alone:
        make(CONFIG).prepare(StepPlan(scores=(scored,), drops=drops(rows))).after_attention(state, state.ring)
    for i, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert torch.equal(raw_bytes(one.cache), raw_bytes(other.cache)), i


@interpreted
@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("scratch_bytes", [1, 20_000])
@pytest.mark.parametrize("granularity", ["token", "block"])
@pytest.mark.parametrize("pool", [1, 5])
def test_many_tiles_and_little_scratch_memory_triton(
    tile: int, scratch_bytes: int, granularity: str, pool: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drop_rows, "_TILE", tile)
    monkeypatch.setattr(drop_rows, "_TILE_ELEMENTS", 8 * 32)
    monkeypatch.setattr(drop_rows, "SCRATCH_BYTES", scratch_bytes)
    plain, rows = filled(seed=3)
    pages = plain.copy()
    limits = {
        "pinned_tokens": PINNED,
        "recent_tokens": 16,
        "score_pool": pool,
        "by_block": granularity == "block",
    }
    # By the sum: there the two implementations agree to the bit.
    compact(plain.layer, compaction(rows, DROPPED, 16, **limits, rank_by="sum"))
    config = replace(CONFIG, rank_by="sum", score_pool=pool, granularity=granularity)  # type: ignore[arg-type]
    state = LayerState("layer", pages.layer, torch.empty(0, 2, SHAPE.head_size), AttentionShape(1.0))
    make(config).prepare(StepPlan(drops=drops(rows))).after_attention(state, state.ring)
    assert torch.equal(raw_bytes(pages.cache), raw_bytes(plain.cache))


@interpreted
def test_quantised_keys_and_values_triton() -> None:
    """FP8 holds the same tokens as its numbers in float16 do."""
    dtype = torch.float8_e4m3fn
    shape = replace(SHAPE, dtype=torch.float16)
    wide, rows = filled(seed=4, shape=shape)
    quantised = Pages(replace(SHAPE, dtype=dtype), seed=4)
    for name in ("keys", "values"):
        numbers = getattr(wide.layer, name).nan_to_num(1.0).to(dtype)
        getattr(quantised.layer, name).copy_(numbers)
        getattr(wide.layer, name).copy_(numbers.to(torch.float16))
    quantised.layer.scores.copy_(wide.layer.scores)
    assert wide.layer.positions is not None
    assert quantised.layer.positions is not None
    quantised.layer.positions.copy_(wide.layer.positions)
    query = torch.randn(40, 4, SHAPE.head_size, dtype=torch.float16)
    for pages in (wide, quantised):
        run_scores(
            pages, query, query, rows, [0, 10, 20], [10, 10, 20], AttentionShape(0.3), from_ring=False,
            pinned_blocks=1, half_life=None, make=make,
        )  # fmt: skip
        run_drops(pages, rows, DROPPED, pinned_tokens=16, recent_tokens=16, rank_by="value", make=make)
    for row in rows:
        for head in range(SHAPE.num_kv_heads):
            for name in ("scores", "positions"):
                one, other = (p.get(getattr(p.layer, name), row, head) for p in (wide, quantised))
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, s: (q.double(), s), "dtype of query is torch.float64; the kernels take torch.float32"),
        (lambda q, s: (q[:, :5], s), r"shape of query is \(40, 5, 24\)"),
        (lambda q, s: (q.to("meta"), s), "device of query is meta"),
        (lambda q, s: (q.transpose(0, 1).contiguous().transpose(0, 1), s), "strides of query"),
        (
            lambda q, s: (q, replace(s, ring=s.ring.transpose(0, 1).contiguous().transpose(0, 1))),
            "strides of",
        ),
        (lambda q, s: (q, replace(s, ring=s.ring[:, :, :20].contiguous())), "shape of the kept queries"),
        (lambda q, s: (q, replace(s, cache=layer_of(block_size=24))), "block size is 24; .* power of two"),
        (lambda q, s: (q, replace(s, cache=layer_of(block_size=256))), "block size is 256"),
        (lambda q, s: (q, replace(s, cache=layer_of(head_size=264))), "head size is 264"),
        (
            lambda q, s: (q, replace(s, cache=layer_of(dtype=torch.float64))),
            "dtype is torch.float64; .* one of",
        ),
    ],
)
def test_what_kernels_cannot_take_is_named(
    change: Callable[[torch.Tensor, LayerState], tuple[torch.Tensor, LayerState]], message: str
) -> None:
    query = torch.zeros(40, 6, 24)
    state = LayerState("layer", layer_of(), torch.zeros(64, 6, 24), AttentionShape(1.0))
    query, state = change(query, state)
    with pytest.raises(KernelError, match=message):
        make(CONFIG).prepare(StepPlan()).after_attention(state, query)


def test_layers_of_a_group_have_to_be_alike() -> None:
    def state(name: str, **changes: object) -> LayerState:
        return LayerState(name, layer_of(**changes), torch.zeros(64, 6, 24), AttentionShape(1.0))

    for changes, message in (
        ({"num_blocks": 61}, "shape of keys of b is"),
        ({"dtype": torch.bfloat16}, "dtype of keys of b is torch.bfloat16; the kernels take torch.float32"),
    ):
        with pytest.raises(KernelError, match=message):
            LayerGroup.of([state("a"), state("b", **changes)])


def layer_of(**changes: object) -> PagedLayer:
    pages = Pages(replace(SHAPE, **changes), seed=0)  # type: ignore[arg-type]
    return PagedLayer.from_gpu_cache(pages.cache, positions=pages.shape.positions)
