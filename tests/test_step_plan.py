"""Plans of simulated schedules: what is due is done once, what is not is left alone.

The simulation drops the region that compaction frees, as a policy that keeps the newest tokens would. So
tokens never move, and what each slot holds is known without any scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from vllm_h2o import step_plan
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.plain import prepare
from vllm_h2o.kernels.plain.compaction import Compaction
from vllm_h2o.kernels.plain.prepare import PlainKernels, PlainStep
from vllm_h2o.kernels.plain.scoring import DecodeFlush, PrefillChunk
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.step_plan import Batch, StepPlan
from vllm_h2o.trace import TraceLog

NUM_BLOCKS = 200
STALE = 900
"""Ids from here on are of blocks that a row had or will have; nobody may read them."""


def config(
    block_size: int = 4, budget_blocks: int = 4, pinned_blocks: int = 1, **changes: object
) -> KVPolicyConfig:
    values: dict[str, object] = {
        "name": "h2o",
        "block_size": block_size,
        "budget_tokens": budget_blocks * block_size,
        "recent_tokens": block_size,
        "pinned_blocks": pinned_blocks,
        "granularity": "token",
        "score_half_life_tokens": None,
        "score_pool": 1,
        "max_model_len": 60 * block_size,
        "max_in_flight_tokens": 64,
    }
    return KVPolicyConfig(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Request:
    number: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)  # logical, with those that are gone
    scored: int = 0  # queries that are part of the scores: positions below this

    def live_blocks(self, gap: int, pinned: int) -> list[int]:
        return self.blocks[:pinned] + self.blocks[pinned + gap :]


@dataclass
class Work:
    """A step's plan, and what becomes of it as tensors."""

    plan: StepPlan
    step: PlainStep

    @property
    def flushes(self) -> list[DecodeFlush]:
        return [work for work in self.step.scores if isinstance(work, DecodeFlush)]

    @property
    def chunks(self) -> list[PrefillChunk]:
        return [work for work in self.step.scores if isinstance(work, PrefillChunk)]


class World:
    """A scheduler with its block pool, and what a layer's memory would hold, as numbers per slot.

    With `prefix_caching` requests start with the pinned blocks of one that is running.
    """

    def __init__(
        self, cfg: KVPolicyConfig, trace: TraceLog | None = None, prefix_caching: bool = False
    ) -> None:
        self.cfg = cfg
        self.prefix_caching = prefix_caching
        num_slots = 16
        ring = QueryRing(num_slots, cfg.block_size)
        self.planner = StepPlanner(cfg, ring, trace)
        self.free = list(range(1, NUM_BLOCKS))
        self.requests: dict[int, Request] = {}
        self.num_requests = 0
        shape = (NUM_BLOCKS, cfg.block_size)
        self.position = np.full(shape, -1)
        self.score = np.full(shape, np.nan)
        self.ring: list[tuple[int, int] | None] = [None] * (num_slots * cfg.block_size)

    def evicted(self, tokens: int) -> int:
        bs, budget = self.cfg.block_size, self.cfg.budget_tokens
        return 0 if tokens < budget else (tokens - budget) // bs + 1

    def end(self, key: int) -> None:
        if key in self.requests:
            blocks = self._held(self.requests.pop(key))
            others = {block for request in self.requests.values() for block in self._held(request)}
            self.free += [block for block in blocks if block not in others]

    def _held(self, request: Request) -> list[int]:
        return request.live_blocks(self.evicted(request.computed), self.cfg.pinned_blocks)

    def start(self) -> Request:
        request = Request(self.num_requests)
        self.num_requests += 1
        pinned = self.cfg.pinned_blocks
        for other in self.requests.values() if self.prefix_caching else ():
            if other.computed >= self.cfg.pinned_tokens:
                request.blocks = other.blocks[:pinned]
                request.computed = request.scored = self.cfg.pinned_tokens
        return request

    def step(self, wanted: Sequence[tuple[int, int]], num_padding: int = 0, num_null: int = 0) -> Work:
        """One step of requests (by key) with new tokens each; checks the plan and carries it out."""
        rows: list[tuple[Request, int]] = []
        for key, new in wanted:
            if key in self.requests and self.requests[key].computed + new > self.cfg.max_model_len:
                self.end(key)
        started = {key: self.start() for key, _ in wanted if key not in self.requests}
        self.requests |= started
        for key, new in wanted:
            request = self.requests[key]
            while len(request.blocks) * self.cfg.block_size < request.computed + new:
                request.blocks.append(self.free.pop())
            rows.append((request, new))
        batch = self._batch(rows, num_padding, num_null)
        plan = self.planner.plan(batch)
        work = Work(plan, PlainKernels(self.cfg).prepare(plan))
        self._check_ids(work)
        self._carry_out(work, rows, num_null)
        for request, new in rows:
            request.computed += new
            if new > 1 or request.computed % self.cfg.block_size == 0:
                request.scored = request.computed
        self._check_compaction(work.step.compaction, rows)
        self._check_scores()
        return work

    # --- what the planner is given ----------------------------------------------------------------

    def _batch(self, rows: list[tuple[Request, int]], num_padding: int, num_null: int) -> Batch:
        """Null-block rows in front, then the rows, then padding with lengths and ids of earlier steps."""
        bs, pinned = self.cfg.block_size, self.cfg.pinned_blocks
        width = self.cfg.max_model_len // bs
        tables = [[0] * width] * num_null
        lens, new_tokens = [3] * num_null, [1 + i for i in range(num_null)]
        for request, new in rows:
            gap = self.evicted(request.computed)
            # The real table keeps the ids of freed blocks, which belong to others by now.
            table = list(request.blocks)
            table[pinned : pinned + gap] = [STALE + i for i in range(gap)]
            tables.append(table + [STALE + 50 + i for i in range(width - len(table))])
            lens.append(request.computed + new)
            new_tokens.append(new)
        for i in range(num_padding):
            tables.append([STALE] * width)
            lens.append(i * 37 % self.cfg.max_model_len)
            new_tokens.append(0)
        self.first_token = np.cumsum([0, *new_tokens])
        table_array = np.array(tables, dtype=np.int32).reshape(-1, width)
        batch = self.planner.batch(np.array(lens, dtype=np.int64), self.first_token, table_array)
        for row, (request, new) in enumerate(rows, start=num_null):
            gap = self.evicted(request.computed)
            live = request.live_blocks(gap, pinned)
            assert batch.live_table[row, : len(live)].tolist() == live
            assert (batch.computed[row], batch.new[row]) == (request.computed, new)
            assert (batch.gap_blocks[row], batch.total[row]) == (gap, request.computed + new)
        assert batch.has_gap or all(self.evicted(request.computed) == 0 for request, _ in rows)
        return batch

    # --- what comes back --------------------------------------------------------------------------

    def _check_ids(self, work: Work) -> None:
        tensors = [work.step.started_blocks, *(chunk.blocks for chunk in work.chunks)]
        for flush in work.flushes:
            tensors += [flush.blocks, flush.write_blocks]
        if work.step.compaction is not None:
            tensors.append(work.step.compaction.blocks)
        assert all(bool((ids < STALE).all()) for ids in tensors)

    def _carry_out(self, work: Work, rows: list[tuple[Request, int]], num_null: int) -> None:
        bs = self.cfg.block_size
        first_token = {r.number: int(self.first_token[num_null + i]) for i, (r, _) in enumerate(rows)}
        # Queries to the ring: exactly those of the decode rows.
        step = work.step
        slot_of = dict(zip(step.append_tokens.tolist(), step.append_slots.tolist(), strict=True))
        decodes = {first_token[r.number]: (r.number, r.computed) for r, new in rows if new == 1}
        assert set(slot_of) == set(decodes)
        for token, slot in slot_of.items():
            self.ring[slot] = decodes[token]
        # Blocks that are started: exactly the new ones.
        started = {}
        for request, new in rows:
            for block_idx in range(-(-request.computed // bs), -(-(request.computed + new) // bs)):
                started[request.blocks[block_idx]] = [block_idx * bs + offset for offset in range(bs)]
        planned = dict(zip(step.started_blocks.tolist(), step.started_positions.tolist(), strict=True))
        assert len(planned) == step.started_blocks.numel()
        assert planned == started
        for block, positions in planned.items():
            self.position[block] = positions
            self.score[block] = 0
        # Scores: kept queries of a row before its chunk, each at most once, exactly where something is due.
        flushed, chunked = [], []
        for scored in step.scores:
            if isinstance(scored, DecodeFlush):
                flushed += self._flush(scored, rows)
            else:
                chunked.append(self._chunk(scored, rows, first_token))
        due = [
            request.number
            for request, new in rows
            if ((request.computed + 1) % bs == 0 if new == 1 else request.scored < request.computed)
        ]
        assert sorted(flushed) == sorted(due)
        assert sorted(chunked) == sorted(request.number for request, new in rows if new > 1)

    def _owner(self, blocks: list[int], rows: list[tuple[Request, int]]) -> tuple[Request, int]:
        """The row with these live blocks; no two end with the same one."""
        for request, new in rows:
            last = (request.computed + new - 1) // self.cfg.block_size
            live = self._held(request)
            tails = request.blocks[request.computed // self.cfg.block_size], request.blocks[last]
            if blocks[-1] in tails and blocks == live[: len(blocks)]:
                return request, new
        raise AssertionError(f"no row has live blocks {blocks}")

    def _weight(self, age: int) -> float:
        half_life = self.cfg.score_half_life_tokens
        return 1.0 if half_life is None else 0.5 ** (age / half_life)

    def _flush(self, flush: DecodeFlush, rows: list[tuple[Request, int]]) -> Iterator[int]:
        bs = self.cfg.block_size
        writes: list[tuple[int, int, int]] = []
        # What is scored without a mask is seen by the query and the row that see least.
        assert flush.seen_by_all == int(flush.visible.sum(dim=2).min())
        # Read everything before anything is written: the rows are one batch.
        for r, padded in enumerate(flush.blocks.tolist()):
            blocks = [block for block in padded if block != step_plan.NULL_BLOCK]
            assert padded == blocks + [step_plan.NULL_BLOCK] * (len(padded) - len(blocks))
            request, new = self._owner(blocks, rows)
            newest = request.computed if new == 1 else request.computed - 1
            pending = [offset for offset in range(bs) if flush.weights[r, offset] > 0]
            held = [self.ring[int(flush.ring_slots[r]) * bs + offset] for offset in pending]
            assert held == [(request.number, q) for q in range(request.scored, newest + 1)]
            positions = self.position[blocks].flatten()
            decay = self._weight(len(pending))
            assert flush.decay[r].item() == pytest.approx(decay)
            added = np.zeros(len(positions))
            for offset in range(bs):
                visible = flush.visible[r, offset].numpy()
                # A row of logits that sees nothing has no softmax, and nobody sees padding.
                assert visible.any()
                assert not visible[len(positions) :].any()
                if offset in pending:
                    query = request.computed // bs * bs + offset
                    assert visible[: len(positions)].tolist() == (positions <= query).tolist()
                    assert flush.weights[r, offset].item() == pytest.approx(self._weight(newest - query))
                    added += flush.weights[r, offset].item() * visible[: len(positions)]
            for col, block in enumerate(blocks):
                if col >= self.cfg.pinned_blocks:
                    writes.append((r, col, block))
                    self.score[block] = self.score[block] * decay + added[col * bs : (col + 1) * bs]
            yield request.number
        planned = zip(
            flush.write_rows.tolist(), flush.write_cols.tolist(), flush.write_blocks.tolist(), strict=True
        )
        assert sorted(planned) == sorted(writes)

    def _chunk(
        self, chunk: PrefillChunk, rows: list[tuple[Request, int]], first_token: dict[int, int]
    ) -> int:
        bs = self.cfg.block_size
        request, new = self._owner(chunk.blocks.tolist(), rows)
        assert (chunk.first_token, chunk.num_queries) == (first_token[request.number], new)
        assert chunk.pinned_blocks == min(self.cfg.pinned_blocks, chunk.blocks.numel())
        positions = self.position[chunk.blocks].flatten()
        assert -(-chunk.num_live // bs) == chunk.blocks.numel()
        assert positions[chunk.num_live - 1] == request.computed + new - 1
        added = np.zeros(positions.size)
        for i in range(new):
            seen = np.arange(positions.size) < chunk.num_live - new + i + 1
            assert seen.tolist() == (positions <= request.computed + i).tolist()
            assert chunk.weights[i].item() == pytest.approx(self._weight(new - 1 - i))
            added += chunk.weights[i].item() * seen
        assert chunk.decay == pytest.approx(self._weight(new))
        for col, block in enumerate(chunk.blocks.tolist()):
            if col >= chunk.pinned_blocks:
                self.score[block] = self.score[block] * chunk.decay + added[col * bs : (col + 1) * bs]
        return request.number

    def _check_compaction(self, plan: Compaction | None, rows: list[tuple[Request, int]]) -> None:
        """Runs after the step: exactly the rows that lost blocks, which are freed here."""
        cfg, bs = self.cfg, self.cfg.block_size
        due = []
        for request, new in rows:
            before, after = self.evicted(request.computed - new), self.evicted(request.computed)
            if after > before:
                due.append((request, request.computed - before * bs, before, after))
        assert (plan is None) == (not due)
        if plan is None:
            return
        assert plan.score_pool == cfg.score_pool
        assert plan.by_block == (cfg.granularity == "block")
        assert len(plan.blocks) == len(due)
        slots = range(plan.blocks.shape[1] * bs)
        for r, (request, live, before, after) in enumerate(due):
            # All scores are up to date when victims are chosen.
            assert request.scored == request.computed
            blocks = request.live_blocks(before, cfg.pinned_blocks)
            padding = [step_plan.NULL_BLOCK] * (plan.blocks.shape[1] - len(blocks))
            assert plan.blocks[r].tolist() == blocks + padding
            dropped = (after - before) * bs
            assert plan.num_dropped_tokens[r] == dropped
            pinned = cfg.pinned_tokens
            expected = {
                "live": [slot < live for slot in slots],
                "pinned": [slot < pinned for slot in slots],
                "eligible": [pinned <= slot < live - cfg.recent_tokens for slot in slots],
                "freed": [pinned <= slot < pinned + dropped for slot in slots],
            }
            for name, mask in expected.items():
                assert getattr(plan, name)[r, 0].tolist() == mask, name
            self.free += request.blocks[cfg.pinned_blocks + before : cfg.pinned_blocks + after]

    def _check_scores(self) -> None:
        """Every live token was scored once by each query so far that saw it, but for pending ones."""
        bs, cfg = self.cfg.block_size, self.cfg
        for request in self.requests.values():
            for col, block in enumerate(self._held(request)):
                for offset in range(bs):
                    position = int(self.position[block, offset])
                    if position >= request.computed:
                        assert self.score[block, offset] == 0
                        continue
                    ages = range(max(0, request.scored - position)) if col >= cfg.pinned_blocks else ()
                    expected = sum(self._weight(age) for age in ages)
                    assert self.score[block, offset] == pytest.approx(expected)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[KVPolicyConfig, list[list[tuple[int, int]]], int]:
    block_size = draw(st.sampled_from([2, 4]))
    pinned = draw(st.integers(0, 2))
    cfg = config(
        block_size,
        budget_blocks=pinned + draw(st.integers(2, 5)),
        pinned_blocks=pinned,
        recent_tokens=draw(st.integers(0, block_size)),
        score_half_life_tokens=draw(st.sampled_from([None, 6.0])),
        granularity=draw(st.sampled_from(["token", "block"])),
    )
    new = st.sampled_from([1, 1, 1, 1, 2, 3, 5, 8, 21])
    some = st.lists(st.tuples(st.integers(0, 3), new), max_size=4, unique_by=lambda row: row[0])
    steps: list[list[tuple[int, int]]] = []
    for _ in range(draw(st.integers(1, 8))):
        # The same rows for a while, as in decode; others are skipped meanwhile.
        step = draw(some)
        steps.append(step)
        steps += [[(key, 1) for key, _ in step]] * draw(st.integers(0, 2 * block_size))
        if draw(st.integers(0, 3)) == 0:
            steps.append([(draw(st.integers(0, 3)), 0)])  # ends
    return cfg, steps, draw(st.sampled_from([1, 16, 40, 8192]))


@settings(max_examples=150)
@given(schedules(), st.booleans(), st.integers(0, 2), st.integers(0, 2))
def test_everything_is_scored_exactly_once(
    case: tuple[KVPolicyConfig, list[list[tuple[int, int]]], int],
    prefix_caching: bool,
    num_padding: int,
    num_null: int,
) -> None:
    cfg, steps, max_flush_slots = case
    world = World(cfg, prefix_caching=prefix_caching)
    with mock.patch.object(prepare, "MAX_FLUSH_SLOTS", max_flush_slots):
        for step in steps:
            if step and step[0][1] == 0:
                world.end(step[0][0])
                continue
            work = world.step(step, num_padding, num_null)
            for flush in work.flushes:
                longest = int(flush.visible.sum(dim=2).max())
                assert len(flush.blocks) == 1 or len(flush.blocks) * longest <= max_flush_slots
            if work.flushes and work.chunks and work.step.compaction:
                event("flush, chunk and compaction in one step")
    assert world.planner.ring.lost_queries == 0


def test_flushes_group_rows_of_like_length() -> None:
    """Five tail blocks fill in one step; a batch costs its rows times the longest of them."""
    world = World(config(budget_blocks=50))
    lengths = {0: 8, 1: 36, 2: 12, 3: 40, 4: 8}
    world.step([(key, length - 1) for key, length in lengths.items()])
    with mock.patch.object(prepare, "MAX_FLUSH_SLOTS", 80):
        work = world.step([(key, 1) for key in lengths])
    assert [tuple(flush.blocks.shape) for flush in work.flushes] == [(2, 10), (3, 3)]


def test_one_row_longer_than_a_batch_goes_alone() -> None:
    world = World(config(budget_blocks=50))
    world.step([(0, 39), (1, 7)])
    with mock.patch.object(prepare, "MAX_FLUSH_SLOTS", 20):
        work = world.step([(0, 1), (1, 1)])
    assert [tuple(flush.blocks.shape) for flush in work.flushes] == [(1, 10), (1, 2)]


def test_nothing_is_due_between_block_boundaries() -> None:
    """The usual decode step costs one copy of the queries and nothing else."""
    world = World(config())
    world.step([(0, 13)])
    for offset in (1, 2):
        plan = world.step([(0, 1)]).plan
        assert plan.append_slots.item() % 4 == offset
        assert not (plan.started_blocks.size)
        assert not (plan.scores)
        assert plan.drops is None
    work = world.step([(0, 1)])  # 16 tokens: the block and the budget are full
    assert len(work.flushes) == 1
    assert work.step.compaction is not None


@pytest.mark.parametrize("left_over", [1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_queries_of_an_ended_request_are_not_scored_for_the_next(left_over: int, prompt: int) -> None:
    """Nobody says that a request has ended; the next one may get its tail block, at the same offset."""
    world = World(config())
    for _ in range(left_over):
        world.step([(0, 1)])
    tail = world.requests[0].blocks[0]
    world.end(0)
    world.step([(0, prompt)])
    assert world.requests[0].blocks[0] == tail
    while world.requests[0].computed < 8:
        world.step([(0, 1)])


@pytest.mark.parametrize(("num_padding", "num_null"), [(0, 0), (3, 0), (0, 2), (2, 1)])
def test_steps_without_real_rows_do_nothing(num_padding: int, num_null: int) -> None:
    """Warm-up, profiling and padding; a request's pending queries outlast them."""
    world = World(config())
    world.step([(0, 14)])
    world.step([(0, 1)])
    assert world.step([], num_padding, num_null).plan.is_empty
    world.step([(0, 1)])


def test_tensors_have_the_types_that_indexing_needs() -> None:
    world = World(config())
    world.step([(0, 15), (1, 3)])
    work = world.step([(0, 1), (1, 17)])
    step, flush, chunk, compaction = work.step, work.flushes[0], work.chunks[0], work.step.compaction
    assert compaction is not None
    by_type: dict[torch.dtype, list[torch.Tensor]] = {
        torch.int64: [
            *(step.append_tokens, step.append_slots, step.started_blocks, chunk.blocks),
            *(flush.ring_slots, flush.blocks, flush.write_rows, flush.write_cols, flush.write_blocks),
            *(compaction.blocks, compaction.num_dropped_tokens),
        ],
        torch.int32: [step.started_positions],
        torch.float32: [flush.weights, flush.decay, chunk.weights],
        torch.bool: [flush.visible, compaction.live, compaction.eligible, compaction.freed],
    }
    for dtype, tensors in by_type.items():
        assert [t.dtype for t in tensors] == [dtype] * len(tensors)


def test_trace_tells_which_steps_were_compacted() -> None:
    log = TraceLog()
    world = World(config(trace=True), log)
    world.step([(0, 5), (1, 15)])
    plan = world.step([(0, 1), (1, 1), (2, 30)], num_padding=1, num_null=1).plan
    # Steps 0 and 1 are the first two rows; of the next three the last two lost blocks.
    assert plan.trace is log
    assert plan.trace_steps == (3, 4)
    first_blocks = [world.requests[key].blocks[0] for key in (0, 1, 2)]
    assert log.steps == [
        (first_blocks[0], 0, 5),
        (first_blocks[1], 0, 15),
        (first_blocks[0], 5, 1),
        (first_blocks[1], 15, 1),
        (first_blocks[2], 0, 30),
    ]
