"""Plan, scores and compaction together, against the reference, without vLLM.

Random requests share a small pool; each step is carried out as the attention layer does it, and compared,
slot by slot, with lists of tokens that are scored after every step and cut by `reference`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import reference
from paged import Shape, padded_cache
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.base import AttentionShape, Kernels, LayerState
from vllm_h2o.kernels.native.prepare import NativeKernels
from vllm_h2o.kernels.plain.prepare import PlainKernels
from vllm_h2o.layout import PagedLayer
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.step_plan import StepPlan

HEADS, GROUP, HEAD_SIZE, BLOCK, RING_SLOTS = 2, 2, 4, 4, 6
LAYER = 3
ATTENTION = AttentionShape(scale=0.6)


@dataclass
class Token:
    """A live token of one head; compared by identity of its position, key and value."""

    position: int
    key: list[float]
    value: list[float]
    score: float = 0.0


@dataclass
class Request:
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    heads: list[list[Token]] = field(default_factory=lambda: [[] for _ in range(HEADS)])
    pending: list[list[list[list[float]]]] = field(default_factory=lambda: [[] for _ in range(HEADS)])


class Engine:
    """One evicting layer under a scheduler, and the reference beside it."""

    def __init__(self, cfg: KVPolicyConfig, kernels: type[Kernels], seed: int) -> None:
        self.cfg = cfg
        self.kernels = kernels(cfg)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        shape = Shape(60, HEADS, BLOCK, HEAD_SIZE, positions=cfg.tracks_positions)
        cache = padded_cache(shape)
        cache.fill_(torch.nan)  # the null block, and whatever nobody wrote
        self.layer = PagedLayer.from_cpu_cache(cache, isa="vec", positions=cfg.tracks_positions)
        self.layer.scores.fill_(torch.nan)
        self.planner = StepPlanner(cfg, QueryRing(RING_SLOTS, BLOCK), None)
        ring = torch.full((RING_SLOTS * BLOCK, HEADS * GROUP, HEAD_SIZE), torch.nan)
        self.state = LayerState(f"model.layers.{LAYER}.attn", self.layer, ring, ATTENTION)
        self.free = list(range(1, 60))
        self.requests: list[Request] = []
        self.num_compacted = 0

    def evicted(self, tokens: int) -> int:
        return 0 if tokens < self.cfg.budget_tokens else (tokens - self.cfg.budget_tokens) // BLOCK + 1

    def live_blocks(self, request: Request) -> list[int]:
        pinned = self.cfg.pinned_blocks
        return request.blocks[:pinned] + request.blocks[pinned + self.evicted(request.computed) :]

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.free += self.live_blocks(request)

    def step(self, rows: list[tuple[Request, int]]) -> None:
        """Compute new tokens of some requests, in the order given."""
        num_tokens = sum(new for _, new in rows)
        query, key, value = (
            torch.randn(num_tokens, heads, HEAD_SIZE, generator=self.generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        key[: num_tokens // 2] *= 3  # some tokens are looked at much more than others
        first = 0
        for request, new in rows:
            for position in range(request.computed, request.computed + new):
                if position % BLOCK == 0:
                    request.blocks.append(self.free.pop())
                token = first + position - request.computed
                block = request.blocks[position // BLOCK]
                self.layer.keys[block, :, :, position % BLOCK] = key[token]
                self.layer.values[block, :, position % BLOCK] = value[token]
            first += new
        plan = self._plan(rows)
        freed = {id(r): self.live_blocks(r) for r, _ in rows}
        self._carry_out(plan, query)
        first = 0
        for request, new in rows:
            tokens = slice(first, first + new)
            self._reference_step(request, query[tokens], key[tokens], value[tokens])
            self.free += set(freed[id(request)]) - set(self.live_blocks(request))
            self._compare(request, scored=new > 1 or request.computed % BLOCK == 0)
            first += new

    def _plan(self, rows: list[tuple[Request, int]]) -> StepPlan:
        width = max((len(request.blocks) for request, _ in rows), default=0) + 3
        table = np.zeros((len(rows), width), dtype=np.int32)
        for r, (request, _) in enumerate(rows):
            # Freed ids stay in front, and anything may be behind.
            table[r] = request.blocks + [
                self.random.randrange(60) for _ in range(width - len(request.blocks))
            ]
        new = np.array([new for _, new in rows], dtype=np.int64)
        computed = np.array([request.computed for request, _ in rows], dtype=np.int64)
        batch = self.planner.batch(computed + new, np.cumsum([0, *new]), table)
        return self.planner.plan(batch)

    def _carry_out(self, plan: StepPlan, query: torch.Tensor) -> None:
        """As the attention layer does."""
        if plan.drops is not None:
            self.num_compacted += plan.drops.num_live.size
        self.kernels.prepare(plan).after_attention(self.state, query)

    def _reference_step(
        self, request: Request, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        cfg, new = self.cfg, len(query)
        before, after = self.evicted(request.computed), self.evicted(request.computed + new)
        num_freed = (after - before) * BLOCK
        for head in range(HEADS):
            tokens = request.heads[head]
            for i in range(new):
                position = request.computed + i
                tokens.append(Token(position, key[i, head].tolist(), value[i, head].tolist()))
            scores = self._reference_scores(request, head, query[:, head * GROUP : (head + 1) * GROUP])
            # Pinned tokens may be shared, so attention to them is not recorded.
            first = cfg.pinned_tokens if cfg.scores_attention else 0
            for token, score in zip(tokens[first:], scores[first:], strict=True):
                token.score = score
            if num_freed:
                dropped = reference.victims(
                    self._reference_ranks(tokens, request.computed + new),
                    [token.position for token in tokens],
                    num_freed,
                    pinned_tokens=cfg.pinned_tokens,
                    recent_tokens=cfg.recent_tokens,
                    pool=cfg.score_pool,
                    block_size=BLOCK if cfg.granularity == "block" else None,
                )
                compacted = reference.compacted(
                    tokens, dropped, pinned_tokens=cfg.pinned_tokens, num_freed=num_freed
                )
                request.heads[head] = [token for token in compacted if token is not None]
        request.computed += new

    def _reference_scores(self, request: Request, head: int, query: torch.Tensor) -> list[float]:
        """Scores of one head's tokens, the new ones among them."""
        cfg, tokens, new = self.cfg, request.heads[head], len(query)
        scores, keys = [token.score for token in tokens], [token.key for token in tokens]
        if cfg.rank_by == "random":
            return [reference.drawn_rank(token.position, LAYER, head, HEADS) for token in tokens]
        if not cfg.scores_attention:
            return scores
        if cfg.score_window_tokens is None:
            return reference.scores_after(
                scores, keys, query.tolist(), scale=ATTENTION.scale, half_life=cfg.score_half_life_tokens
            )
        # Queries are scored in flushes, and here it matters which are in one.
        pending = request.pending[head]
        if new > 1 and pending:
            self._flush(scores, keys[:-new], pending)
        pending += query.tolist()
        if new > 1 or (request.computed + new) % BLOCK == 0:
            self._flush(scores, keys, pending)
        return scores

    def _flush(self, scores: list[float], keys: list[list[float]], pending: list[list[list[float]]]) -> None:
        window = self.cfg.score_window_tokens
        assert window is not None
        scores[: len(keys)] = reference.windowed_scores_after(
            scores[: len(keys)], keys, pending, window=window, scale=ATTENTION.scale
        )
        pending.clear()

    def _reference_ranks(self, tokens: list[Token], num_tokens: int) -> list[float]:
        cfg, scores = self.cfg, [token.score for token in tokens]
        if cfg.rank_by == "mean":
            positions = [token.position for token in tokens]
            return reference.mean_ranks(scores, positions, num_tokens, cfg.score_half_life_tokens)
        if cfg.rank_by == "value":
            return reference.value_ranks(scores, [token.value for token in tokens])
        if cfg.rank_by == "keys":
            return reference.key_ranks([token.key for token in tokens])
        if cfg.rank_by == "age":
            return [float(token.position) for token in tokens]
        return scores

    def _compare(self, request: Request, scored: bool) -> None:
        blocks, layer = self.live_blocks(request), self.layer
        for head, tokens in enumerate(request.heads):
            num_live = len(tokens)
            keys = layer.keys[blocks, head].transpose(1, 2).flatten(0, 1)[:num_live]
            values = layer.values[blocks, head].flatten(0, 1)[:num_live]
            assert keys.tolist() == [token.key for token in tokens]
            assert values.tolist() == [token.value for token in tokens]
            if layer.positions is not None:
                positions = layer.positions[blocks, head].flatten()[:num_live]
                assert positions.tolist() == [token.position for token in tokens]
            # Between two fills of the tail block some queries are still pending.
            if scored and self.cfg.rank_by not in ("keys", "age"):
                got = layer.scores[blocks, head].flatten()[:num_live]
                want = torch.tensor([token.score for token in tokens])
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def config(**changes: object) -> KVPolicyConfig:
    values: dict[str, object] = {
        "name": "h2o",
        "block_size": BLOCK,
        "budget_tokens": 5 * BLOCK,
        "recent_tokens": 6,
        "pinned_blocks": 1,
        "granularity": "token",
        "score_half_life_tokens": None,
        "score_pool": 1,
        "max_model_len": 10_000,
        "max_in_flight_tokens": 100,
    }
    return KVPolicyConfig(**{**values, **changes})  # type: ignore[arg-type]


CONFIGS: dict[str, dict[str, object]] = {
    "paper": {},
    "half-life": {"score_half_life_tokens": 7.0},
    "pool": {"score_pool": 3},
    "half-life and wide pool": {"score_half_life_tokens": 7.0, "score_pool": 15, "recent_tokens": 2},
    "blocks": {"granularity": "block"},
    "pooled blocks": {"granularity": "block", "score_pool": 5, "score_half_life_tokens": 20.0},
    "nothing pinned": {"pinned_blocks": 0},
    "mean": {"rank_by": "mean", "trace": True},
    "mean of half-life": {"rank_by": "mean", "score_half_life_tokens": 9.0},
    "value": {"rank_by": "value"},
    "pooled values by block": {"rank_by": "value", "score_pool": 3, "granularity": "block"},
    "snapkv": {"name": "snapkv", "score_window_tokens": 3, "score_pool": 3},
    "snapkv, whole block": {"name": "snapkv", "score_window_tokens": BLOCK},
    "tova": {"name": "tova", "score_window_tokens": 1, "recent_tokens": 0},
    "keydiff": {"name": "keydiff", "rank_by": "keys", "recent_tokens": 0},
    "pooled keydiff by block": {
        "name": "keydiff",
        "rank_by": "keys",
        "score_pool": 3,
        "granularity": "block",
    },
    "random": {"name": "random", "rank_by": "random"},
    "random by block": {"name": "random", "rank_by": "random", "granularity": "block"},
    "streaming": {"name": "streaming", "rank_by": "age", "recent_tokens": 0, "trace": True},
    "no recent window": {"recent_tokens": 0, "pinned_blocks": 2, "trace": True},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("kernels", [PlainKernels, NativeKernels])
def test_planned_work_equals_the_reference(name: str, seed: int, kernels: type[Kernels]) -> None:
    engine = Engine(config(**CONFIGS[name]), kernels, seed)
    choose = engine.random
    for _ in range(150):
        for request in list(engine.requests):
            if choose.random() < 0.01 or request.computed > 90:
                engine.end(request)
        if len(engine.requests) < 3 and choose.random() < 0.3:
            engine.requests.append(Request())
        rows = []
        for request in engine.requests:
            if choose.random() < 0.1:
                continue  # skipped in this step
            prompt = request.computed == 0 or choose.random() < 0.03
            rows.append((request, choose.choice([2, 5, 11, 17, 34]) if prompt else 1))
        choose.shuffle(rows)
        engine.step(rows)
    assert engine.num_compacted > 20
    assert engine.planner.ring.lost_queries == 0
