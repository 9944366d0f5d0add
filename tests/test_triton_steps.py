"""Whole steps on a GPU's side, against the same steps in tensor operations, without vLLM.

One side is driven as `vllm_h2o.engine.gpu` does it: planned from numbers, queries kept and chunks scored per
layer, and the rest left for the beginning of the next step, for all layers at once. The other does everything
after each layer's attention. Requests share a pool of few blocks, which are reused as soon as they are freed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from paged import INTERPRETED, Shape, padded_cache
from schedules import Request, Schedule, Step
from vllm_h2o import retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.device_plan import DevicePlanner
from vllm_h2o.kernels.base import AttentionShape, LayerState
from vllm_h2o.kernels.plain.prepare import PlainKernels
from vllm_h2o.layout import PagedLayer
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing, num_ring_slots
from vllm_h2o.request_ring import RequestRing

pytest.importorskip("triton")

from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.prepare import TritonKernels, TritonStep, append_slots, keep_queries
from vllm_h2o.kernels.triton.upload import to_device

CPU = torch.device("cpu")
LAYERS, HEADS, GROUP, HEAD_SIZE, BLOCK, MAX_REQUESTS, NUM_BLOCKS = 2, 2, 2, 8, 8, 3, 40

CONFIG = KVPolicyConfig(
    name="h2o",
    block_size=BLOCK,
    budget_tokens=4 * BLOCK,
    recent_tokens=5,
    pinned_blocks=1,
    granularity="token",
    score_half_life_tokens=9.0,
    score_pool=3,
    max_model_len=24 * BLOCK,
    max_in_flight_tokens=64,
    rank_by="value",
)


class Side:
    """The layers of a model in memory of one side's own."""

    def __init__(self, config: KVPolicyConfig, num_slots: int) -> None:
        shape = Shape(NUM_BLOCKS, HEADS, BLOCK, HEAD_SIZE, positions=config.tracks_positions)
        self.caches = [padded_cache(shape) for _ in range(LAYERS)]
        self.layers = []
        for i, cache in enumerate(self.caches):
            cache.fill_(torch.nan)
            layer = PagedLayer.from_gpu_cache(cache, positions=config.tracks_positions)
            layer.scores.fill_(torch.nan)
            ring = torch.full((num_slots * BLOCK, HEADS * GROUP, HEAD_SIZE), torch.nan)
            self.layers.append(
                LayerState(f"model.layers.{i}.attn", layer, ring, AttentionShape(0.5 + i / 10))
            )

    def write(self, step: Step, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """What attention writes before it runs."""
        cache, token = self.layers[layer].cache, 0
        for row, (total, new) in enumerate(zip(step.totals, step.new, strict=True)):
            for position in range(total - new, total):
                block = int(step.table[row, position // BLOCK])
                cache.keys[block, :, :, position % BLOCK] = key[token]
                cache.values[block, :, position % BLOCK] = value[token]
                token += 1


class Plain(Side):
    """All of a layer's work right after its attention."""

    def __init__(self, config: KVPolicyConfig) -> None:
        num_slots = num_ring_slots(MAX_REQUESTS)
        super().__init__(config, num_slots)
        self.planner = StepPlanner(config, QueryRing(num_slots, BLOCK), None)
        self.kernels = PlainKernels(config)

    def step(self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        starts = np.concatenate([[0], np.cumsum(step.new)])
        plan = self.planner.plan(self.planner.batch(np.array(step.totals), starts, step.table))
        work = self.kernels.prepare(plan)
        for i, layer in enumerate(self.layers):
            self.write(step, i, key[i], value[i])
            work.after_attention(layer, query[i])
        return plan.drops is not None


class Device(Side):
    """As `vllm_h2o.engine.gpu.steps` does it."""

    def __init__(self, config: KVPolicyConfig) -> None:
        super().__init__(config, MAX_REQUESTS)
        self.planner = DevicePlanner(config, RequestRing(MAX_REQUESTS, BLOCK))
        self.kernels = TritonKernels(config, CPU)
        self.group = LayerGroup.of(self.layers)
        self.alone = [LayerGroup.of([layer]) for layer in self.layers]
        self.unfinished: TritonStep | None = None

    def finish(self) -> None:
        if self.unfinished is not None:
            self.unfinished.finish(self.group)
        self.unfinished = None

    def step(self, step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        assert self.unfinished is None
        # A row of padding behind, and a table that the next step overwrites.
        table = torch.from_numpy(np.pad(step.table, ((0, 1), (0, 0))))
        starts = np.concatenate([[0], np.cumsum([*step.new, 0])])
        totals = np.array([*step.totals, 0])
        plan = self.planner.plan(
            self.planner.device_batch(totals, starts, table, np.array(step.requests, dtype=np.int64))
        )
        self.unfinished = self.kernels.prepare(plan)
        self.unfinished.start(self.group)
        (slots,) = to_device([append_slots(plan)], CPU)
        table.fill_(-1)
        for i, layer in enumerate(self.layers):
            self.write(step, i, key[i], value[i])
            if slots.numel():
                keep_queries(query[i], layer.ring, slots)
            self.unfinished.score_chunks(self.alone[i], query[i])


def compare(plain: Plain, device: Device, requests: list[Request], config: KVPolicyConfig) -> None:
    for request in requests:
        evicted = retention.evicted_blocks(
            request.computed, budget_tokens=config.budget_tokens, block_size=BLOCK
        )
        first = config.pinned_blocks
        blocks = request.blocks[:first] + request.blocks[first + evicted :]
        num_live = request.computed - evicted * BLOCK
        if num_live == 0:
            continue  # preempted, or new
        for ours, theirs in zip(device.layers, plain.layers, strict=True):
            for head in range(HEADS):
                for name in ("keys", "values", "positions", "scores"):
                    found, expected = (
                        _live(getattr(state.cache, name), name, blocks, head)[:num_live]
                        for state in (ours, theirs)
                    )
                    tolerance = 1e-5 if name == "scores" else 0.0
                    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def _live(view: torch.Tensor, name: str, blocks: list[int], head: int) -> torch.Tensor:
    chosen = view[blocks, head]
    return (chosen.transpose(1, 2) if name == "keys" else chosen).flatten(0, 1)


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="defaults"),
        pytest.param({"name": "snapkv", "score_window_tokens": 3, "rank_by": "sum"}, id="snapkv"),
        pytest.param({"name": "random", "rank_by": "random"}, id="random"),
    ],
)
def test_deferred_steps_keep_what_immediate_ones_keep_triton(changes: dict[str, object]) -> None:
    config = replace(CONFIG, **{"score_half_life_tokens": None, **changes} if changes else {})  # type: ignore[arg-type]
    schedule = Schedule(
        config, seed=5, max_requests=MAX_REQUESTS, num_blocks=NUM_BLOCKS, chunks=(1, 3, 2 * BLOCK)
    )
    generator = torch.Generator().manual_seed(5)
    plain, device = Plain(config), Device(config)
    requests: list[Request] = []
    dropped = 0
    for _ in range(100):
        step = schedule.step()
        if not step.requests:
            continue  # nothing runs, and nothing is finished
        # Only now, when blocks that were freed since have changed hands.
        device.finish()
        compare(plain, device, requests, config)
        requests = [replace(request, blocks=list(request.blocks)) for request in schedule.slots if request]
        num_tokens = sum(step.new)
        query, key, value = (
            torch.randn(LAYERS, num_tokens, heads, HEAD_SIZE, generator=generator)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        device.step(step, query, key, value)
        dropped += plain.step(step, query, key, value)
    device.finish()
    compare(plain, device, requests, config)
    assert dropped > 10
