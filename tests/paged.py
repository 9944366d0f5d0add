"""Paged caches as vLLM's CPU backend lays them out, rows of requests in them, and work for those rows.

Everything that a test should not depend on is poisoned with NaN: the null block, blocks of nobody, and
the slots behind a row's last token.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_h2o.config import KVPolicyConfig, RankBy
from vllm_h2o.kernels.base import AttentionShape, Kernels, LayerState
from vllm_h2o.kernels.native.prepare import NativeKernels
from vllm_h2o.kernels.plain.compaction import Compaction
from vllm_h2o.kernels.plain.ranks import RankRule
from vllm_h2o.kernels.plain.scoring import DecodeFlush, PrefillChunk
from vllm_h2o.layout import PagedLayer, side_bytes_per_block
from vllm_h2o.step_plan import DropRows, ScoreRows, StepPlan

NULL_BLOCK = 0

MakeKernels = Callable[[KVPolicyConfig], Kernels]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this run is of the Triton kernels, in its interpreter; they then are the only ones looked at."""


GPU_LAYOUT = INTERPRETED
"""Whether caches are laid out as on a GPU."""


def triton_kernels(config: KVPolicyConfig) -> Kernels:
    from vllm_h2o.kernels.triton.prepare import TritonKernels

    return TritonKernels(config, torch.device("cpu"))


COMPILED: dict[str, MakeKernels] = {"triton": triton_kernels} if INTERPRETED else {"native": NativeKernels}
"""What has to do the same as tensor operations, by name."""

ALL_KERNELS = [*([] if INTERPRETED else ["torch"]), *COMPILED]


@dataclass(frozen=True)
class Shape:
    """Sizes of one layer's cache."""

    num_blocks: int = 40
    num_kv_heads: int = 2
    block_size: int = 4
    head_size: int = 8
    dtype: torch.dtype = torch.float32
    positions: bool = False
    isa: str = "vec"  # of CPU layouts

    @property
    def page_bytes(self) -> int:
        content = self.num_kv_heads * self.block_size * 2 * self.head_size * self.dtype.itemsize
        side = side_bytes_per_block(self.num_kv_heads, self.block_size, positions=self.positions)
        return content + side


def padded_cache(shape: Shape, *, spare_bytes: int = 0, offset_bytes: int = 0) -> torch.Tensor:
    """The tensor that a layer gets: `[num_blocks, num_kv_heads, block_size, 2 * head_size]`, zeroed.

    Its blocks lie `page_bytes + spare_bytes` apart, in raw memory that vLLM allocates as bytes.
    """
    page_bytes = shape.page_bytes + spare_bytes
    raw = torch.zeros(offset_bytes + shape.num_blocks * page_bytes, dtype=torch.int8)
    row = 2 * shape.head_size
    return (
        raw[offset_bytes:]
        .view(shape.dtype)
        .as_strided(
            (shape.num_blocks, shape.num_kv_heads, shape.block_size, row),
            (page_bytes // shape.dtype.itemsize, shape.block_size * row, row, 1),
        )
    )


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a view, as bytes that alias it. Comparing bytes tells NaN from NaN."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@dataclass
class Row:
    """Live tokens of one request: its blocks in order without the evicted ones, and how many tokens."""

    blocks: list[int]
    num_live: int

    def slots(self, block_size: int) -> list[tuple[int, int]]:
        """Block id and offset of each live token."""
        return [(self.blocks[slot // block_size], slot % block_size) for slot in range(self.num_live)]


class Pages:
    """A poisoned cache that rows are put into."""

    def __init__(self, shape: Shape, seed: int, **padding: int) -> None:
        self.shape = shape
        self.cache = padded_cache(shape, **padding)
        if GPU_LAYOUT:
            self.layer = PagedLayer.from_gpu_cache(self.cache, positions=shape.positions)
        else:
            self.layer = PagedLayer.from_cpu_cache(self.cache, isa=shape.isa, positions=shape.positions)
        self.generator = torch.Generator().manual_seed(seed)
        self._cache_seed = seed
        self._ids = list(range(1, shape.num_blocks))
        random.Random(seed).shuffle(self._ids)
        self.cache.fill_(torch.nan)
        self.layer.scores.fill_(torch.nan)
        if self.layer.positions is not None:
            self.layer.positions.fill_(torch.iinfo(torch.int32).min)

    def copy(self) -> Pages:
        """The same cache in memory of its own."""
        other = Pages(self.shape, self._cache_seed)
        assert raw_bytes(other.cache).shape == raw_bytes(self.cache).shape, "not for padded copies"
        raw_bytes(other.cache).copy_(raw_bytes(self.cache))
        return other

    def random(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator).to(self.shape.dtype)

    def add_row(self, num_live: int) -> Row:
        """A row of random tokens in blocks of its own, scattered over the cache. Scores are 0."""
        bs, layer = self.shape.block_size, self.layer
        row = Row([self._ids.pop() for _ in range(-(-num_live // bs))], num_live)
        layer.scores[row.blocks] = 0  # also behind the last token: so do blocks start
        for slot, (block, offset) in enumerate(row.slots(bs)):
            layer.keys[block, :, :, offset] = self.random(*layer.keys.shape[1:3])
            layer.values[block, :, offset] = self.random(*layer.keys.shape[1:3])
            if layer.positions is not None:
                layer.positions[block, :, offset] = slot
        return row

    def get(self, view: torch.Tensor, row: Row, head: int) -> torch.Tensor:
        """`[num_live, ...]`, one head's live tokens in a view that has block, head and slot dimensions."""
        blocks, offsets = zip(*row.slots(self.shape.block_size), strict=True)
        return view[list(blocks), head, list(offsets)]

    def put(self, view: torch.Tensor, row: Row, head: int, values: torch.Tensor) -> None:
        blocks, offsets = zip(*row.slots(self.shape.block_size), strict=True)
        view[list(blocks), head, list(offsets)] = values.to(view.dtype)

    def keys(self, row: Row, head: int) -> torch.Tensor:
        return self.get(self.layer.keys.transpose(2, 3), row, head)


def padded_blocks(rows: Sequence[Row]) -> torch.Tensor:
    """`[R, M]` int64, the rows' blocks with the null block behind them."""
    width = max(len(row.blocks) for row in rows)
    return torch.tensor([row.blocks + [NULL_BLOCK] * (width - len(row.blocks)) for row in rows])


@dataclass(frozen=True)
class Kept:
    """Decode queries of one row: offsets `[first, stop)` of a ring slot; the last one sees all tokens."""

    row: Row
    ring_slot: int
    first: int
    stop: int


def decode_flush(
    kept: Sequence[Kept], block_size: int, *, pinned_blocks: int = 0, half_life: float | None = None
) -> DecodeFlush:
    """The work that `vllm_h2o.step_plan` hands over, written down from its description."""
    blocks = padded_blocks([k.row for k in kept])
    num_rows, width = blocks.shape
    visible = torch.zeros(num_rows, block_size, width * block_size, dtype=torch.bool)
    weights = torch.zeros(num_rows, block_size)
    for r, k in enumerate(kept):
        for offset in range(block_size):
            age = k.stop - 1 - offset
            # A query that isn't pending has weight 0; it must see something for a softmax to exist.
            visible[r, offset, : max(1, min(k.row.num_live, k.row.num_live - age))] = True
            if k.first <= offset < k.stop:
                weights[r, offset] = _weight(age, half_life)
    writes = [
        (r, c, block)
        for r, k in enumerate(kept)
        for c, block in enumerate(k.row.blocks)
        if c >= pinned_blocks
    ]
    rows, cols, ids = torch.tensor(writes, dtype=torch.int64).reshape(-1, 3).T
    return DecodeFlush(
        ring_slots=torch.tensor([k.ring_slot for k in kept]),
        blocks=blocks,
        visible=visible,
        seen_by_all=int(visible.all(dim=0).all(dim=0).int().cumprod(0).sum()),
        weights=weights,
        decay=torch.tensor([_weight(k.stop - k.first, half_life) for k in kept]),
        write_rows=rows,
        write_cols=cols,
        write_blocks=ids,
    )


def prefill_chunk(
    row: Row, first_token: int, num_queries: int, *, pinned_blocks: int = 0, half_life: float | None = None
) -> PrefillChunk:
    """As `decode_flush`, for a row that ends with `num_queries` new tokens."""
    return PrefillChunk(
        first_token=first_token,
        num_queries=num_queries,
        num_live=row.num_live,
        blocks=torch.tensor(row.blocks),
        pinned_blocks=min(pinned_blocks, len(row.blocks)),
        weights=torch.tensor([_weight(num_queries - 1 - i, half_life) for i in range(num_queries)]),
        decay=_weight(num_queries, half_life),
    )


def compaction(
    rows: Sequence[Row],
    num_dropped: Sequence[int],
    block_size: int,
    *,
    pinned_tokens: int | Sequence[int],
    recent_tokens: int,
    score_pool: int = 1,
    by_block: bool = False,
    rank_by: RankBy = "sum",
    total_weights: Sequence[float] = (),
) -> Compaction:
    """As `decode_flush`, for rows that each drop some blocks' worth of tokens."""
    blocks = padded_blocks(rows)
    pins = [pinned_tokens] * len(rows) if isinstance(pinned_tokens, int) else pinned_tokens
    live, eligible, freed = torch.zeros(3, len(rows), 1, blocks.shape[1] * block_size, dtype=torch.bool)
    for r, (row, dropped, pinned) in enumerate(zip(rows, num_dropped, pins, strict=True)):
        live[r, 0, : row.num_live] = True
        eligible[r, 0, pinned : row.num_live - recent_tokens] = True
        freed[r, 0, pinned : pinned + dropped] = True
    return Compaction(
        blocks=blocks,
        live=live,
        eligible=eligible,
        freed=freed,
        num_dropped_tokens=torch.tensor(list(num_dropped)),
        pinned=torch.arange(live.shape[2]).expand_as(live) < torch.tensor(pins)[:, None, None],
        score_pool=score_pool,
        by_block=by_block,
        rule=RankRule(
            rank_by, torch.tensor([total_tokens(row) for row in rows]), torch.tensor(list(total_weights))
        ),
    )


def total_tokens(row: Row) -> int:
    """As many as if some had been dropped before."""
    return row.num_live + 5


def run_scores(
    pages: Pages,
    ring: torch.Tensor,
    query: torch.Tensor,
    rows: Sequence[Row],
    first_queries: Sequence[int],
    num_queries: Sequence[int],
    attention: AttentionShape,
    *,
    from_ring: bool,
    pinned_blocks: int,
    half_life: float | None,
    make: MakeKernels = NativeKernels,
) -> None:
    """Have kernels score rows as a step's plan; `ring` and `query` are `[n, num_heads, head_size]`."""
    counts = np.array(num_queries, dtype=np.int64)
    plan = StepPlan(
        scores=(
            ScoreRows(
                from_ring=np.full(len(rows), from_ring),
                first_query=np.array(first_queries, dtype=np.int64),
                num_queries=counts,
                num_live=np.array([row.num_live for row in rows], dtype=np.int64),
                live_table=padded_blocks(rows).int().numpy(),
                weights=np.array(
                    [_weight(age, half_life) for age in reversed(range(counts.max()))], dtype=np.float32
                ),
                decay=np.array([_weight(int(n), half_life) for n in counts], dtype=np.float32),
            ),
        )
    )
    pinned_tokens = pinned_blocks * pages.shape.block_size
    run_plan(pages, plan, ring, query, attention, pinned_tokens=pinned_tokens, make=make)


def run_drops(
    pages: Pages,
    rows: Sequence[Row],
    num_dropped: Sequence[int],
    *,
    pinned_tokens: int,
    recent_tokens: int,
    score_pool: int = 1,
    by_block: bool = False,
    rank_by: RankBy = "sum",
    total_weights: Sequence[float] = (),
    make: MakeKernels = NativeKernels,
) -> None:
    """As `compaction`, carried out by kernels as a step's plan."""
    plan = StepPlan(
        drops=DropRows(
            num_live=np.array([row.num_live for row in rows], dtype=np.int64),
            num_dropped=np.array(num_dropped, dtype=np.int64),
            live_table=padded_blocks(rows).int().numpy(),
            num_tokens=np.array([total_tokens(row) for row in rows], dtype=np.int64),
            pinned_tokens=np.full(len(rows), pinned_tokens, dtype=np.int64),
            total_weights=np.array(total_weights, dtype=np.float32),
        )
    )
    nothing = torch.empty(0, pages.shape.num_kv_heads, pages.shape.head_size, dtype=pages.shape.dtype)
    run_plan(
        pages,
        plan,
        nothing,
        nothing,
        AttentionShape(1.0),
        pinned_tokens=pinned_tokens,
        recent_tokens=recent_tokens,
        score_pool=score_pool,
        granularity="block" if by_block else "token",
        rank_by=rank_by,
        make=make,
    )


def run_plan(
    pages: Pages,
    plan: StepPlan,
    ring: torch.Tensor,
    query: torch.Tensor,
    attention: AttentionShape,
    *,
    pinned_tokens: int,
    layer_name: str = "layer",
    make: MakeKernels = NativeKernels,
    **changes: object,
) -> None:
    values: dict[str, object] = {
        "name": "h2o",
        "block_size": pages.shape.block_size,
        "budget_tokens": 1000,
        "recent_tokens": 0,
        "pinned_blocks": pinned_tokens // pages.shape.block_size,
        "granularity": "token",
        "score_half_life_tokens": None,
        "score_pool": 1,
        "max_model_len": 10_000,
        "max_in_flight_tokens": 64,
    }
    kernels = make(KVPolicyConfig(**{**values, **changes}))  # type: ignore[arg-type]
    kernels.prepare(plan).after_attention(LayerState(layer_name, pages.layer, ring, attention), query)


def _weight(age: int, half_life: float | None) -> float:
    return 1.0 if half_life is None else 0.5 ** (age / half_life)
