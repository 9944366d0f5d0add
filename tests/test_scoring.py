"""Scores of random caches, against `reference.scores_after` in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from paged import (
    ALL_KERNELS,
    COMPILED,
    Kept,
    Pages,
    Row,
    Shape,
    decode_flush,
    prefill_chunk,
    raw_bytes,
    run_scores,
)
from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.kernels.plain import scoring
from vllm_h2o.kernels.plain.scoring import score_decode, score_prefill

SCALE = 0.4


@dataclass(frozen=True)
class Model:
    """What the scores depend on besides the rows."""

    shape: Shape
    group: int
    pinned_blocks: int
    half_life: float | None
    softcap: float
    sinks: list[float] | None

    @property
    def num_heads(self) -> int:
        return self.shape.num_kv_heads * self.group

    @property
    def attention(self) -> AttentionShape:
        sinks = None if self.sinks is None else torch.tensor(self.sinks[: self.num_heads])
        return AttentionShape(SCALE, self.softcap, sinks)


MODELS = st.builds(
    Model,
    shape=st.builds(
        Shape,
        num_blocks=st.just(40),
        num_kv_heads=st.integers(1, 3),
        block_size=st.sampled_from([2, 4, 8]),
        head_size=st.sampled_from([4, 6]),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        positions=st.booleans(),
    ),
    group=st.integers(1, 4),
    pinned_blocks=st.integers(0, 2),
    half_life=st.sampled_from([None, 3.0, 40.0]),
    softcap=st.sampled_from([0.0, 0.7]),
    sinks=st.one_of(st.none(), st.lists(st.floats(-2, 3, width=16), min_size=12, max_size=12)),
)


def add_scored_row(pages: Pages, num_live: int, num_new: int) -> Row:
    """A row whose older tokens have scores already."""
    row = pages.add_row(num_live)
    for head in range(pages.shape.num_kv_heads):
        scores = torch.rand(num_live, generator=pages.generator) * 3
        scores[num_live - num_new :] = 0
        pages.put(pages.layer.scores, row, head, scores)
    return row


def expected_scores(pages: Pages, model: Model, row: Row, queries: torch.Tensor) -> list[list[float]]:
    """`[H][L]`, what the reference says after `queries` `[n, num_heads, head_size]`."""
    group, expected = model.group, []
    for head in range(pages.shape.num_kv_heads):
        heads = slice(head * group, (head + 1) * group)
        stored = pages.get(pages.layer.scores, row, head).tolist()
        after = reference.scores_after(
            stored,
            pages.keys(row, head).tolist(),
            queries[:, heads].tolist(),
            scale=SCALE,
            softcap=model.softcap,
            sinks=None if model.sinks is None else torch.tensor(model.sinks)[heads].tolist(),
            half_life=model.half_life,
        )
        # Pinned blocks keep what they have, whatever it is.
        pinned = model.pinned_blocks * pages.shape.block_size
        expected.append(stored[:pinned] + after[pinned:])
    return expected


def check(pages: Pages, before: torch.Tensor, rows: Sequence[Row], expected: Sequence[Any]) -> None:
    """The rows' scores are as expected, and no other byte of the cache has changed."""
    for row, per_head in zip(rows, expected, strict=True):
        for head, scores in enumerate(per_head):
            got = pages.get(pages.layer.scores, row, head)
            want = torch.tensor(scores, dtype=torch.float64)
            torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)
            # Undo, so that all the rest can be compared as it is. Slots behind the last token are part
            # of the rest: they have to stay 0.
            pages.put(pages.layer.scores, row, head, torch.zeros(row.num_live))
    assert torch.equal(raw_bytes(pages.cache), before)


def snapshot(pages: Pages, rows: Sequence[Row]) -> torch.Tensor:
    """The cache's bytes with the rows' scores taken for 0."""
    zeroed = pages.copy()
    for row in rows:
        for head in range(pages.shape.num_kv_heads):
            zeroed.put(zeroed.layer.scores, row, head, torch.zeros(row.num_live))
    return raw_bytes(zeroed.cache)


# --- chunks of a prompt ---------------------------------------------------------------------------


def check_prefill(
    model: Model, num_live: Sequence[int], num_new: Sequence[int], seed: int, kernels: str
) -> None:
    pages = Pages(model.shape, seed)
    rows = [add_scored_row(pages, *lengths) for lengths in zip(num_live, num_new, strict=True)]
    pages.add_row(7)  # somebody else's
    # Queries of other rows in front and behind must not matter.
    query = torch.full((3 + sum(num_new) + 2, model.num_heads, model.shape.head_size), torch.nan)
    query = query.to(model.shape.dtype)
    expected, chunks, firsts, first = [], [], [], 3
    for row, new in zip(rows, num_new, strict=True):
        query[first : first + new] = pages.random(new, *query.shape[1:])
        expected.append(expected_scores(pages, model, row, query[first : first + new]))
        chunks.append(
            prefill_chunk(row, first, new, pinned_blocks=model.pinned_blocks, half_life=model.half_life)
        )
        firsts.append(first)
        first += new
    before = snapshot(pages, rows)
    untouched = query.clone()
    if kernels != "torch":
        empty_ring = query[:0]
        run_scores(
            pages,
            empty_ring,
            query,
            rows,
            firsts,
            num_new,
            model.attention,
            from_ring=False,
            pinned_blocks=model.pinned_blocks,
            half_life=model.half_life,
            make=COMPILED[kernels],
        )
    else:
        for chunk in chunks:
            score_prefill(pages.layer, query, chunk, model.attention)
    assert torch.equal(query.nan_to_num(7), untouched.nan_to_num(7))
    check(pages, before, rows, expected)


LENGTHS = st.integers(1, 30).flatmap(lambda live: st.tuples(st.just(live), st.integers(1, live)))


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@settings(max_examples=40)
@given(
    model=MODELS,
    lengths=st.lists(LENGTHS, min_size=1, max_size=2),
    tile=st.sampled_from([1, 3, 8, 64]),
    seed=st.integers(0, 2**31),
)
def test_prefill_equals_the_reference(
    model: Model, lengths: list[tuple[int, int]], tile: int, seed: int, kernels: str
) -> None:
    live, new = zip(*lengths, strict=True)
    with mock.patch.object(scoring, "QUERY_TILE", tile):
        check_prefill(model, live, new, seed, kernels)


@pytest.mark.parametrize("num_new", [63, 64, 65, 150, 300])
@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prefill_in_whole_tiles(num_new: int, kernels: str, block_size: int, dtype: torch.dtype) -> None:
    shape = Shape(60, num_kv_heads=1, block_size=block_size, head_size=4, dtype=dtype)
    model = Model(shape, group=3, pinned_blocks=1, half_life=50.0, softcap=0.0, sinks=None)
    check_prefill(model, [num_new + 13], [num_new], num_new, kernels)


# --- kept decode queries --------------------------------------------------------------------------


@st.composite
def kept_rows(draw: st.DrawFn) -> tuple[Model, list[tuple[int, int, int]]]:
    """A model, and per row the ring offsets `[first, stop)` and the live tokens."""
    model = draw(MODELS)
    bs = model.shape.block_size
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        stop = draw(st.integers(1, bs))
        first = draw(st.integers(0, stop - 1))
        # The newest query's token is the last one of the tail block so far.
        rows.append((first, stop, draw(st.integers(0, 4)) * bs + stop))
    return model, rows


@pytest.mark.parametrize("kernels", ALL_KERNELS)
@settings(max_examples=50)
@given(case=kept_rows(), seed=st.integers(0, 2**31))
def test_decode_equals_the_reference(
    case: tuple[Model, list[tuple[int, int, int]]], seed: int, kernels: str
) -> None:
    model, lengths = case
    bs = model.shape.block_size
    pages = Pages(model.shape, seed)
    # Queries of others, and leftovers of earlier owners: if their model produced NaN, it was theirs.
    ring = torch.full((5, bs, model.num_heads, model.shape.head_size), torch.nan).to(model.shape.dtype)
    kept, expected = [], []
    for ring_slot, (first, stop, num_live) in zip((3, 0, 4), lengths, strict=False):
        row = add_scored_row(pages, num_live, stop - first)
        ring[ring_slot, first:stop] = pages.random(stop - first, *ring.shape[2:])
        expected.append(expected_scores(pages, model, row, ring[ring_slot, first:stop]))
        kept.append(Kept(row, ring_slot, first, stop))
    pages.add_row(7)
    rows = [k.row for k in kept]
    before = snapshot(pages, rows)
    untouched = ring.clone()
    options: dict[str, Any] = {"pinned_blocks": model.pinned_blocks, "half_life": model.half_life}
    if kernels != "torch":
        flat = ring.flatten(0, 1)
        firsts, counts = [k.ring_slot * bs + k.first for k in kept], [k.stop - k.first for k in kept]
        run_scores(
            pages, flat, flat[:0], rows, firsts, counts, model.attention, from_ring=True, **options,
            make=COMPILED[kernels],
        )  # fmt: skip
    else:
        score_decode(pages.layer, ring, decode_flush(kept, bs, **options), model.attention)
    assert torch.equal(ring.nan_to_num(7), untouched.nan_to_num(7))
    check(pages, before, rows, expected)


def test_decode_one_by_one_equals_prefill_at_once() -> None:
    """The same queries give the same scores, whichever way they come; with a half-life too."""
    shape = Shape(block_size=8)
    model = Model(shape, group=2, pinned_blocks=1, half_life=5.0, softcap=0.0, sinks=None)
    once = Pages(shape, seed=1)
    row = add_scored_row(once, num_live=24, num_new=8)
    query = once.random(8, model.num_heads, shape.head_size)
    by_step = once.copy()
    options: dict[str, Any] = {"pinned_blocks": 1, "half_life": 5.0}
    score_prefill(once.layer, query, prefill_chunk(row, 0, 8, **options), model.attention)
    for i in range(8):
        so_far = Row(row.blocks, 17 + i)
        flush = decode_flush([Kept(so_far, 0, i, i + 1)], 8, **options)
        score_decode(by_step.layer, query[None], flush, model.attention)
    for head in range(shape.num_kv_heads):
        torch.testing.assert_close(
            once.get(once.layer.scores, row, head), by_step.get(by_step.layer.scores, row, head)
        )


def test_a_tokens_own_attention_is_its_first_score() -> None:
    """By hand: equal keys share the attention equally."""
    shape = Shape(num_kv_heads=1)
    pages = Pages(shape, seed=0)
    row = pages.add_row(4)
    pages.put(pages.layer.keys.transpose(2, 3), row, 0, torch.ones(4, shape.head_size))
    query = torch.ones(4, 1, shape.head_size)
    score_prefill(pages.layer, query, prefill_chunk(row, 0, 4), AttentionShape(1.0))
    fractions = [1 + 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4, 1 / 3 + 1 / 4, 1 / 4]
    torch.testing.assert_close(pages.get(pages.layer.scores, row, 0), torch.tensor(fractions))


def test_a_sink_takes_its_share() -> None:
    shape = Shape(num_kv_heads=1)
    pages = Pages(shape, seed=0)
    row = pages.add_row(1)
    query = torch.zeros(1, 2, shape.head_size)
    # Logit 0 against sinks of log 1 and log 3: 1 / 2 and 1 / 4.
    sinks = torch.tensor([1.0, 3.0]).log()
    score_prefill(pages.layer, query, prefill_chunk(row, 0, 1), AttentionShape(1.0, 0.0, sinks))
    torch.testing.assert_close(pages.get(pages.layer.scores, row, 0), torch.tensor([0.75]))
