"""Compaction of random rows: exactly the right tokens survive, and nothing else changes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from paged import COMPILED, INTERPRETED, Pages, Row, Shape, compaction, raw_bytes, run_drops
from vllm_h2o.kernels.plain.compaction import Compaction, compact

NAN = math.nan


@dataclass(frozen=True)
class Limits:
    """What `vllm_h2o.config` guarantees about the rows: see `droppable_blocks`."""

    pinned_tokens: int
    recent_tokens: int
    score_pool: int
    by_block: bool

    def droppable_blocks(self, num_live: int, block_size: int) -> int:
        return max(0, num_live - self.pinned_tokens - self.recent_tokens) // block_size


@dataclass(frozen=True)
class Case:
    shape: Shape
    limits: Limits
    rows: list[tuple[int, int]]  # live tokens, blocks to drop
    scores: Sequence[Sequence[Sequence[float]]]  # [R][H][L]
    seed: int


# On a grid, so that float32 sums of a block are exact, with many ties among neighbours in rank.
SCORES = st.one_of(
    st.integers(0, 400).map(lambda n: n / 8),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 1.0, NAN]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    bs = draw(st.sampled_from([2, 4]))
    limits = Limits(
        pinned_tokens=bs * draw(st.integers(0, 2)),
        recent_tokens=draw(st.integers(0, 9)),
        score_pool=draw(st.sampled_from([1, 1, 3, 5, 21])),
        by_block=draw(st.booleans()),
    )
    tracked = draw(st.booleans())
    shape = Shape(
        num_blocks=60,
        num_kv_heads=draw(st.integers(1, 3)),
        block_size=bs,
        head_size=draw(st.sampled_from([2, 4])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        positions=tracked or limits.score_pool > 1,
    )
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        smallest = limits.pinned_tokens + limits.recent_tokens + bs
        num_live = draw(st.integers(smallest, smallest + 16))
        rows.append((num_live, draw(st.integers(1, limits.droppable_blocks(num_live, bs)))))
    alike = draw(st.booleans())
    scores = []
    for num_live, _ in rows:
        count = 1 if alike else num_live
        of_head = st.lists(SCORES, min_size=count, max_size=count)
        scores.append([draw(of_head) * (num_live // count) for _ in range(shape.num_kv_heads)])
    return Case(shape, limits, rows, scores, draw(st.integers(0, 2**31)))


def set_up(case: Case) -> tuple[Pages, list[Row]]:
    """The case's rows in a cache, in an order of tokens as earlier compactions leave it behind."""
    pages = Pages(case.shape, case.seed)
    limits, rows = case.limits, []
    for (num_live, _), scores in zip(case.rows, case.scores, strict=True):
        row = pages.add_row(num_live)
        rows.append(row)
        for head in range(case.shape.num_kv_heads):
            pages.put(pages.layer.scores, row, head, torch.tensor(scores[head]))
            if pages.layer.positions is not None:
                # Pinned and recent tokens never moved. Those between are any older ones, in any order.
                between = num_live - limits.pinned_tokens - limits.recent_tokens
                chosen = torch.randperm(between + 5, generator=pages.generator)[:between]
                pinned = torch.arange(limits.pinned_tokens)
                recent = torch.arange(limits.recent_tokens) + limits.pinned_tokens + between + 5
                order = torch.cat([pinned, chosen + limits.pinned_tokens, recent])
                pages.put(pages.layer.positions, row, head, order)
    pages.add_row(case.shape.block_size + 1)  # somebody else's
    return pages, rows


def plan_of(case: Case, rows: list[Row]) -> Compaction:
    return compaction(
        rows,
        [blocks * case.shape.block_size for _, blocks in case.rows],
        case.shape.block_size,
        pinned_tokens=case.limits.pinned_tokens,
        recent_tokens=case.limits.recent_tokens,
        score_pool=case.limits.score_pool,
        by_block=case.limits.by_block,
    )


class Token(NamedTuple):
    """Everything that belongs to a token, as bits."""

    key: bytes
    value: bytes
    score: bytes
    position: int


def tokens_of(pages: Pages, row: Row, head: int) -> list[Token]:
    layer = pages.layer
    parts = [pages.keys(row, head), *(pages.get(v, row, head) for v in (layer.values, layer.scores))]
    bits = [[bytes(raw_bytes(item.clone()).tolist()) for item in part] for part in parts]
    if layer.positions is None:
        positions = [0] * row.num_live
    else:
        positions = pages.get(layer.positions, row, head).tolist()
    return [Token(*fields) for fields in zip(*bits, positions, strict=True)]


def each_head(case: Case, rows: list[Row]) -> Iterator[tuple[int, Row, int, int]]:
    for r, row in enumerate(rows):
        for head in range(case.shape.num_kv_heads):
            yield r, row, head, case.rows[r][1] * case.shape.block_size


def reference_victims(case: Case, pages: Pages, row: Row, head: int, count: int) -> set[int]:
    positions = None
    if pages.layer.positions is not None:
        positions = pages.get(pages.layer.positions, row, head).tolist()
    return reference.victims(
        pages.get(pages.layer.scores, row, head).tolist(),
        positions,
        count,
        pinned_tokens=case.limits.pinned_tokens,
        recent_tokens=case.limits.recent_tokens,
        pool=case.limits.score_pool,
        block_size=case.shape.block_size if case.limits.by_block else None,
    )


@settings(max_examples=250)
@given(cases())
def test_compact_equals_the_reference(case: Case) -> None:
    pages, rows = set_up(case)
    before = pages.copy()
    dropped = compact(pages.layer, plan_of(case, rows))
    for r, row, head, count in each_head(case, rows):
        want = reference_victims(case, before, row, head, count)
        assert set(dropped[r, head].nonzero().flatten().tolist()) == want
        after = reference.compacted(
            tokens_of(before, row, head), want, pinned_tokens=case.limits.pinned_tokens, num_freed=count
        )
        for got, token in zip(tokens_of(pages, row, head), after, strict=True):
            assert token is None or got == token


@pytest.mark.parametrize("kernels", COMPILED)
@settings(max_examples=100 if INTERPRETED else 250)
@given(case=cases())
def test_compiled_compaction_is_the_same_to_the_byte(kernels: str, case: Case) -> None:
    plain, rows = set_up(case)
    compiled = plain.copy()
    compact(plain.layer, plan_of(case, rows))
    dropped = [blocks * case.shape.block_size for _, blocks in case.rows]
    run_drops(compiled, rows, dropped, **vars(case.limits), make=COMPILED[kernels])
    assert torch.equal(raw_bytes(compiled.cache), raw_bytes(plain.cache))


@settings(max_examples=150)
@given(cases())
def test_compact_keeps_its_promises(case: Case) -> None:
    """The same, without a reference: what must hold whatever the scores say."""
    pages, rows = set_up(case)
    before = pages.copy()
    dropped = compact(pages.layer, plan_of(case, rows))
    pinned, recent = case.limits.pinned_tokens, case.limits.recent_tokens
    assert not dropped[:, :, :pinned].any()
    for r, row, head, count in each_head(case, rows):
        old, new = tokens_of(before, row, head), tokens_of(pages, row, head)
        gone = dropped[r, head].tolist()
        assert sum(gone) == count
        assert not any(gone[row.num_live - recent :])
        # Whatever is in the freed region is lost, so all that was kept has to be outside it.
        outside = [*range(pinned), *range(pinned + count, row.num_live)]
        kept = Counter(token for slot, token in enumerate(old) if not gone[slot])
        assert Counter(new[slot] for slot in outside) == kept
        in_place = [slot for slot in outside if not gone[slot]]
        assert set(in_place) >= {*range(pinned), *range(row.num_live - recent, row.num_live)}
        assert [new[slot] for slot in in_place] == [old[slot] for slot in in_place]
        # Nothing has a rank below that of a survivor, within what the policy may choose from.
        if case.limits.score_pool == 1 and not case.limits.by_block:
            scores = torch.tensor(case.scores[r][head]).nan_to_num(math.inf)
            eligible = range(pinned, row.num_live - recent)
            worst_kept = min((float(scores[s]) for s in eligible if not gone[s]), default=math.inf)
            assert max(float(scores[s]) for s in eligible if gone[s]) <= worst_kept
    # Only the rows' own live slots may differ: give them back their old content.
    for _, row, head, _ in each_head(case, rows):
        for view, source in zip(views(pages), views(before), strict=True):
            pages.put(view, row, head, before.get(source, row, head))
    assert torch.equal(raw_bytes(pages.cache), raw_bytes(before.cache))


def views(pages: Pages) -> list[torch.Tensor]:
    layer = pages.layer
    tracked = [] if layer.positions is None else [layer.positions]
    return [layer.keys.transpose(2, 3), layer.values, layer.scores, *tracked]


def simple_case(scores: Sequence[Sequence[float]], blocks: int = 1, **changes: object) -> Case:
    """One row of blocks of 4 with the first block pinned and 4 recent tokens, one list per head."""
    limits = {"pinned_tokens": 4, "recent_tokens": 4, "score_pool": 1, "by_block": False} | changes
    shape = Shape(num_kv_heads=len(scores), positions=limits["score_pool"] != 1)
    return Case(shape, Limits(**limits), [(len(scores[0]), blocks)], [scores], seed=0)  # type: ignore[arg-type]


def dropped_slots(case: Case) -> list[list[int]]:
    pages, rows = set_up(case)
    dropped = compact(pages.layer, plan_of(case, rows))
    return [dropped[0, head].nonzero().flatten().tolist() for head in range(case.shape.num_kv_heads)]


def test_victims_by_hand() -> None:
    middle = [5, 1, 7, 2, 8, 3, 9, 4]
    assert dropped_slots(simple_case([[0] * 4 + middle + [0] * 4])) == [[5, 7, 9, 11]]
    by_block = simple_case([[0] * 4 + middle + [0] * 4], by_block=True)
    assert dropped_slots(by_block) == [[4, 5, 6, 7]]
    assert dropped_slots(simple_case([[0] * 4 + middle[::-1] + [0] * 4], by_block=True)) == [[8, 9, 10, 11]]


def test_heads_are_independent() -> None:
    first, second = [0] * 4 + [1, 2, 3, 4, 5, 6, 7, 8] + [0] * 4, [0] * 4 + [8, 7, 6, 5, 4, 3, 2, 1] + [0] * 4
    alone = [dropped_slots(simple_case([scores]))[0] for scores in (first, second)]
    assert alone == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert dropped_slots(simple_case([first, second])) == alone


@pytest.mark.parametrize("score", [0.0, 1.0, NAN, math.inf, 3e38])
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("score_pool", [1, 3])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_ties_never_drop_what_is_protected(
    score: float, by_block: bool, score_pool: int, blocks: int
) -> None:
    """All scores alike, even past what float32 sums hold: as many go as must, oldest slots first."""
    case = simple_case([[score] * 21] * 2, blocks, by_block=by_block, score_pool=score_pool)
    slots = dropped_slots(case)
    assert all(len(gone) == 4 * blocks for gone in slots)
    assert all(4 <= slot < 17 for gone in slots for slot in gone)
    if score_pool == 1 or by_block:
        assert slots == [list(range(4, 4 + 4 * blocks))] * 2


def test_pooled_ties_go_by_age() -> None:
    """A survivor that was moved to a later slot is still the older one."""
    case = simple_case([[1.0] * 16], score_pool=3)
    pages, rows = set_up(case)
    assert pages.layer.positions is not None
    positions = torch.tensor([*range(4), 9, 8, 7, 6, 5, 4, 11, 10, *range(20, 24)])
    pages.put(pages.layer.positions, rows[0], 0, positions)
    dropped = compact(pages.layer, plan_of(case, rows))
    assert dropped[0, 0].nonzero().flatten().tolist() == [6, 7, 8, 9]  # positions 7, 6, 5 and 4


def test_pool_reaches_into_the_recent_window_but_not_into_pinned_tokens() -> None:
    case = simple_case([[9.0] * 4 + [1, 1, 2, 2, 3, 3, 0, 0] + [9.0] * 4], score_pool=3)
    pages, rows = set_up(case)
    assert pages.layer.positions is not None
    pages.put(pages.layer.positions, rows[0], 0, torch.arange(16))
    dropped = compact(pages.layer, plan_of(case, rows))
    # Ranks 1, 2, 2, 3, 3, 3, 3, 9: the last one has a recent neighbour, the first one a pinned one.
    assert dropped[0, 0].nonzero().flatten().tolist() == [4, 5, 6, 7]


def test_dropping_nothing_that_has_to_move_leaves_the_cache_alone() -> None:
    """The victims are the freed region itself: streaming, or scores that rise with age."""
    case = simple_case([[0] * 4 + [1, 1, 1, 1, 5, 5, 5, 5] + [0] * 4])
    pages, rows = set_up(case)
    before = raw_bytes(pages.cache).clone()
    compact(pages.layer, plan_of(case, rows))
    assert torch.equal(raw_bytes(pages.cache), before)
