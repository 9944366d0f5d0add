#!/usr/bin/env python3
"""Checks and times the Triton kernels on a GPU; needs torch, triton and NumPy, but no vLLM.

    python scripts/device_check.py                  # on a GPU, a few minutes
    TRITON_INTERPRET=1 python scripts/device_check.py --toy    # on a CPU, sizes of a toy: checks only

Every kernel is held to the tensor operations of `vllm_h2o/kernels/plain` (scores to float64) on random
inputs, and timed in the shape of Llama 3.1 8B (32 heads, 8 KV heads, head size 128, bfloat16, blocks of 16):
decode attention over the budget plus all that eviction adds to it, against attention over the whole context.
The result is a table and a JSON, scripts/results/device.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the package needn't be installed

from vllm_h2o.config import KVPolicyConfig, RankBy
from vllm_h2o.kernels.base import AttentionShape, LayerState
from vllm_h2o.kernels.plain.prepare import PlainKernels
from vllm_h2o.kernels.triton.drop_rows import DropWork
from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.prepare import TritonKernels, keep_queries
from vllm_h2o.kernels.triton.score_rows import ScoreWork
from vllm_h2o.layout import PagedLayer, side_bytes_per_block
from vllm_h2o.step_plan import DropRows, ScoreRows, StepPlan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


@dataclass(frozen=True)
class Shape:
    """One layer: heads, head size, block size, dtype."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def cache(self, num_blocks: int) -> torch.Tensor:
        """Random ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with padding, on the device."""
        content = self.num_kv_heads * self.block_size * 2 * self.head_size
        side = side_bytes_per_block(self.num_kv_heads, self.block_size, positions=True) // self.dtype.itemsize
        raw = torch.empty(num_blocks * (content + side), dtype=self.dtype, device=DEVICE)
        cache = raw.as_strided(
            (num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_size),
            (content + side, self.block_size * 2 * self.head_size, 2 * self.head_size, 1),
        )
        cache.normal_()
        return cache

    def layer(self, num_blocks: int, ring_queries: int) -> LayerState:
        views = PagedLayer.from_gpu_cache(self.cache(num_blocks), positions=True)
        views.scores.uniform_()
        ring = torch.randn(ring_queries, self.num_heads, self.head_size, device=DEVICE).to(self.dtype)
        return LayerState("layers.0", views, ring, AttentionShape(self.head_size**-0.5))


def config(shape: Shape, budget: int, *, rank_by: RankBy = "value", pool: int = 15) -> KVPolicyConfig:
    """The defaults of h2o."""
    return KVPolicyConfig(
        name="h2o", block_size=shape.block_size, budget_tokens=budget, recent_tokens=max(1, budget // 10),
        pinned_blocks=1, granularity="token", score_half_life_tokens=32.0, score_pool=pool,
        max_model_len=1 << 18, max_in_flight_tokens=8192, rank_by=rank_by,
    )  # fmt: skip


def table(rows: int, live: int, block_size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Scattered blocks; block 0 is nobody's."""
    width = -(-live // block_size)
    ids = np.random.default_rng(seed).permutation(rows * width) + 1
    return ids.reshape(rows, width).astype(np.int32)


def set_positions(layer: LayerState, blocks: np.ndarray[Any, Any], live: int) -> None:
    """As after many compactions: three times as many tokens were seen, and those between are in any order."""
    assert layer.cache.positions is not None
    for row in torch.from_numpy(blocks).to(DEVICE):
        order = torch.arange(row.numel() * layer.cache.block_size, device=DEVICE) * 3
        first, stop = layer.cache.block_size, live - live // 8
        order[first:stop] = order[first:stop][torch.randperm(stop - first, device=DEVICE)]
        layer.cache.positions[row.long()] = order.int().view(row.numel(), 1, -1)


def scored(blocks: np.ndarray[Any, Any], live: int, queries: int, first: int, *, ring: bool) -> ScoreRows:
    rows = blocks.shape[0]
    return ScoreRows(
        from_ring=np.full(rows, ring),
        first_query=np.arange(rows) * first,
        num_queries=np.full(rows, queries),
        num_live=np.full(rows, live),
        live_table=blocks,
        weights=(0.5 ** (np.arange(queries)[::-1] / 32)).astype(np.float32),
        decay=np.full(rows, 0.5, dtype=np.float32),
    )


def dropped(blocks: np.ndarray[Any, Any], live: int, tokens: int, policy: KVPolicyConfig) -> DropRows:
    rows = blocks.shape[0]
    pinned = np.full(rows, policy.pinned_tokens)
    return DropRows(np.full(rows, live), np.full(rows, tokens), blocks, np.full(rows, 3 * live), pinned)


# --- correctness ----------------------------------------------------------------------------------


def on_cpu(layer: LayerState) -> LayerState:
    """A copy of a layer in the CPU's memory."""
    raw = torch.empty(0, dtype=layer.cache.keys.dtype, device=DEVICE)
    raw.set_(layer.cache.keys.untyped_storage())
    first = layer.cache.keys
    blocks, heads, size, slots = first.shape
    cache = raw.to("cpu", copy=True).as_strided(
        (blocks, heads, slots, 2 * size), (first.stride(0), first.stride(1), 2 * size, 1)
    )
    views = PagedLayer.from_gpu_cache(cache, positions=True)
    return LayerState(layer.name, views, layer.ring.to("cpu", copy=True), layer.shape)


def check_scores(shape: Shape, live: int, queries: int, *, ring: bool) -> float:
    """Largest relative error of a score, against float32 tensor operations on float32 copies."""
    blocks = table(3, live, shape.block_size)
    layer = shape.layer(int(blocks.max()) + 1, 4096)
    rows = scored(blocks, live, queries, max(queries, shape.block_size), ring=ring)
    policy = config(shape, 128)
    query = layer.ring[: 3 * max(queries, shape.block_size)]
    expected = on_cpu(layer)
    double = expected.cache.keys.double()
    TritonKernels(policy, DEVICE).prepare(StepPlan(scores=(rows,))).after_attention(layer, query)
    group, worst = shape.num_heads // shape.num_kv_heads, 0.0
    for r in range(3):
        keys = double[blocks[r]].permute(1, 2, 0, 3).flatten(2)[:, :, :live]
        first = int(rows.first_query[r])
        q = query[first : first + queries].cpu().double().unflatten(1, (shape.num_kv_heads, group))
        logits = torch.einsum("nhgd,hdl->hgnl", q, keys) * layer.shape.scale
        seen = torch.arange(live) < (live - queries + 1 + torch.arange(queries))[:, None]
        probabilities = logits.masked_fill(~seen, -torch.inf).softmax(dim=3)
        added = (probabilities * torch.from_numpy(rows.weights)[:, None].double()).sum(dim=(1, 2))
        old = expected.cache.scores[blocks[r]].transpose(0, 1).flatten(1)[:, :live].double()
        want = old * 0.5 + added
        want[:, : shape.block_size] = old[:, : shape.block_size]  # pinned
        got = layer.cache.scores.cpu()[blocks[r]].transpose(0, 1).flatten(1)[:, :live].double()
        worst = max(worst, float(((got - want).abs() / want.abs().clamp(min=1e-3)).max()))
    return worst


def check_drops(shape: Shape, live: int, tokens: int, rank_by: RankBy, pool: int, granularity: str) -> int:
    """How many 16-bit words of the cache differ from what tensor operations leave."""
    blocks = table(3, live, shape.block_size)
    layer = shape.layer(int(blocks.max()) + 1, shape.block_size)
    # On a grid, so that sums and products are the same in any order.
    layer.cache.scores.copy_((layer.cache.scores * 64).round() / 64)
    layer.cache.values.copy_(layer.cache.values.sign())
    set_positions(layer, blocks, live)
    expected = on_cpu(layer)
    policy = config(shape, live - tokens, rank_by=rank_by, pool=pool)
    policy = KVPolicyConfig(**{**vars(policy), "granularity": granularity})
    plan = StepPlan(drops=dropped(blocks, live, tokens, policy))
    PlainKernels(policy).prepare(plan).after_attention(expected, expected.ring)
    TritonKernels(policy, DEVICE).prepare(plan).after_attention(layer, layer.ring)
    differing = 0
    for name in ("keys", "values", "scores", "positions"):
        ours, theirs = getattr(layer.cache, name).cpu(), getattr(expected.cache, name)
        differing += int((ours != theirs).sum())
    return differing


def check_all(toy: bool) -> dict[str, Any]:
    """Every kernel at several shapes; raises AssertionError where one is wrong."""
    found: dict[str, Any] = {}
    sizes = [(64, 24), (200, 40)] if toy else [(64, 24), (1000, 300), (4096, 2048)]
    shapes = [Shape(8, 2, 64, 16)] if toy else [Shape(), Shape(14, 2, 64, 32), Shape(8, 1, 256, 16)]
    if not toy:
        shapes.append(Shape(dtype=torch.float16, block_size=128))
    for shape in shapes:
        for live, queries in sizes:
            error = check_scores(shape, live, queries, ring=False)
            found[f"scores of a chunk, {shape}, {live}"] = error
            kept = check_scores(shape, live, min(shape.block_size, live), ring=True)
            found[f"scores of kept queries, {shape}, {live}"] = kept
            assert max(error, kept) < 1e-3, (shape, live, error, kept)
        for live, tokens in [(96, 32)] if toy else [(512, 128), (5000, 4096), (33_000, 128)]:
            for rank_by, pool, granularity in (
                ("sum", 1, "token"), ("value", 15, "token"), ("sum", 15, "block"),
            ):  # fmt: skip
                wrong = check_drops(shape, live, tokens, rank_by, pool, granularity)  # type: ignore[arg-type]
                found[f"drops by {rank_by}, pool {pool}, {granularity}, {shape}, {live}"] = wrong
                assert wrong == 0, (shape, live, rank_by, pool, granularity, wrong)
    return found


# --- timings --------------------------------------------------------------------------------------


def milliseconds(work: Callable[[], object], repeats: int = 12) -> float:
    """Median time of ``work`` on the device."""
    work()
    taken = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken)


def rates() -> dict[str, float]:
    """What the card reaches: bytes copied per second (read and written), and products of bfloat16."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    return {
        "copy_gb_per_s": 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e6,
        "matmul_tflop_per_s": 2 * 8192**3 / milliseconds(lambda: a @ a) / 1e9,
    }


def attention_ms(shape: Shape, batch: int, live: int, queries: int = 1) -> float:
    """Torch's own attention over contiguous K and V: what a paged kernel does at best."""
    size = (batch, shape.num_kv_heads, live, shape.head_size)
    key, value = (torch.randn(size, device=DEVICE, dtype=shape.dtype) for _ in range(2))
    query = torch.randn(batch, shape.num_heads, queries, shape.head_size, device=DEVICE, dtype=shape.dtype)
    attend = torch.nn.functional.scaled_dot_product_attention
    return milliseconds(lambda: attend(query, key, value, is_causal=queries > 1, enable_gqa=True))


def decode(shape: Shape, batch: int, context: int, share: float = 0.2) -> dict[str, float]:
    """One layer's decode step: attention over all, over the budget, and what eviction adds on average.

    A row is scored, and drops a block, once per ``block_size`` steps; so ``batch / block_size`` rows a step.
    """
    bs = shape.block_size
    budget = round(context * share) // bs * bs
    due = max(1, round(batch / bs))
    per_step = batch / bs / due
    blocks = table(due, budget, bs)
    layer = shape.layer(int(blocks.max()) + 1, batch * bs)
    set_positions(layer, blocks, budget)
    group, policy = LayerGroup.of([layer]), config(shape, budget - bs)
    score = ScoreWork.of(scored(blocks, budget, bs, bs, ring=True), policy, DEVICE)
    drop = DropWork.of(dropped(blocks, budget, bs, policy), policy, DEVICE)
    query = torch.randn(batch, shape.num_heads, shape.head_size, device=DEVICE).to(shape.dtype)
    slots = torch.arange(batch, dtype=torch.int32, device=DEVICE) * bs
    found = {
        "attention_ms": attention_ms(shape, batch, budget),
        "keep_ms": milliseconds(lambda: keep_queries(query, layer.ring, slots)),
        "score_ms": per_step * milliseconds(lambda: score.run(group, layer.ring)),
        "drop_ms": per_step * milliseconds(lambda: drop.run(group)),
    }
    full_bytes = 2 * batch * context * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize
    if full_bytes < 0.6 * torch.cuda.mem_get_info()[0]:
        found["full_attention_ms"] = attention_ms(shape, batch, context)
    added = found["keep_ms"] + found["score_ms"] + found["drop_ms"]
    found["added_share_of_attention"] = added / found["attention_ms"]
    if "full_attention_ms" in found:
        found["times_faster_than_full"] = found["full_attention_ms"] / (found["attention_ms"] + added)
    return found


def prefill(shape: Shape, tokens: int) -> dict[str, float]:
    """One layer's attention to a prompt, and scoring it."""
    blocks = table(1, tokens, shape.block_size)
    layer = shape.layer(int(blocks.max()) + 1, shape.block_size)
    query = torch.randn(tokens, shape.num_heads, shape.head_size, device=DEVICE).to(shape.dtype)
    group = LayerGroup.of([layer])
    work = ScoreWork.of(scored(blocks, tokens, tokens, tokens, ring=False), config(shape, tokens), DEVICE)
    lse = torch.zeros(1, tokens, shape.num_heads, device=DEVICE)
    attention = attention_ms(shape, 1, tokens, tokens)
    score, known = (
        milliseconds(lambda: work.run(group, query)),
        milliseconds(lambda: work.run(group, query, lse)),
    )
    return {
        "attention_ms": attention, "score_ms": score, "score_with_known_lse_ms": known,
        "score_share_of_attention": score / attention, "share_with_known_lse": known / attention,
    }  # fmt: skip


def time_all(seconds: float) -> dict[str, Any]:
    """Decode at several contexts and batches, prefill, until the time is used up."""
    deadline, shape = time.monotonic() + seconds, Shape()
    found: dict[str, Any] = {"rates": rates(), "decode": {}, "prefill": {}}
    for tokens in (2048, 8192, 32_768):
        found["prefill"][str(tokens)] = prefill(shape, tokens)
    for context in (32_768, 8192, 131_072):
        for batch in (1, 16, 64, 256):
            if time.monotonic() > deadline:
                found["cut"] = f"stopped before context {context}, batch {batch}"
                return found
            found["decode"][f"{context} x {batch}"] = decode(shape, batch, context)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--toy", action="store_true", help="small sizes, no timings; on any machine")
    parser.add_argument("--seconds", type=float, default=150, help="for the timings of decode")
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "device.json")
    options = parser.parse_args()
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; TRITON_INTERPRET=1 with --toy runs on a CPU")
    torch.manual_seed(0)
    content: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "Triton's interpreter",
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "checks": check_all(options.toy),
    }
    print(f"{len(content['checks'])} checks passed on {content['device']}")
    if not options.toy:
        content |= time_all(options.seconds)
        print(json.dumps({name: content[name] for name in ("rates", "prefill", "decode")}, indent=1))
    if not options.toy or options.output != parser.get_default("output"):
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
