#!/usr/bin/env python3
"""Times what a layer does after its attention kernel: native kernels against torch's tensor operations.

    python scripts/measure_kernels.py [--output scripts/results/kernels.json]

One layer of SmolLM2-135M's shape, bfloat16 and float32; both implementations take turns in one process;
medians in milliseconds, ratios of the medians. Run it in the project's environment on an idle machine, with
OMP_NUM_THREADS set to the number of cores to use.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

import machine
from setup_steps import ROOT
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.kernels.base import AttentionShape, Kernels, LayerState
from vllm_h2o.kernels.native.prepare import NativeKernels
from vllm_h2o.kernels.plain.prepare import PlainKernels
from vllm_h2o.layout import PagedLayer, side_bytes_per_block
from vllm_h2o.step_plan import DropRows, ScoreRows, StepPlan

KV_HEADS, GROUP, HEAD_SIZE, BLOCK, BLOCKS = 3, 3, 64, 32, 1025
BATCH_TOKENS, RING_SLOTS = 2048, 32

CONFIG = KVPolicyConfig(
    name="h2o",
    block_size=BLOCK,
    budget_tokens=512,
    recent_tokens=256,
    pinned_blocks=1,
    granularity="token",
    score_half_life_tokens=None,
    score_pool=1,
    max_model_len=8192,
    max_in_flight_tokens=BATCH_TOKENS,
)

POOLED = replace(CONFIG, recent_tokens=51, score_half_life_tokens=32.0, score_pool=15, rank_by="value")
"""The defaults of h2o; CONFIG is the paper."""


def layer(dtype: torch.dtype, *, positions: bool) -> LayerState:
    """A layer with random keys, values, scores and kept queries."""
    content_bytes = KV_HEADS * BLOCK * 2 * HEAD_SIZE * dtype.itemsize
    page_bytes = content_bytes + side_bytes_per_block(KV_HEADS, BLOCK, positions=positions)
    cache = (
        torch.zeros(BLOCKS * page_bytes, dtype=torch.int8)
        .view(dtype)
        .as_strided(
            (BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE),
            (page_bytes // dtype.itemsize, BLOCK * 2 * HEAD_SIZE, 2 * HEAD_SIZE, 1),
        )
    )
    cache.copy_(torch.randn(cache.shape))
    # As vLLM chooses for these sizes.
    isa = "amx" if dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported() else "vec"
    views = PagedLayer.from_cpu_cache(cache, isa=isa, positions=positions)
    views.scores.uniform_()
    if views.positions is not None:
        # As after many compactions: any of the earlier tokens, in no order.
        for head in range(KV_HEADS):
            order = torch.randperm(BLOCKS * BLOCK, dtype=torch.int32)
            views.positions[:, head] = order.view(BLOCKS, BLOCK)
    ring = torch.randn(RING_SLOTS * BLOCK, KV_HEADS * GROUP, HEAD_SIZE).to(dtype)
    return LayerState("layer", views, ring, AttentionShape(HEAD_SIZE**-0.5))


def table(num_rows: int, live: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    ids = np.random.default_rng(0).permutation(BLOCKS - 1)[: num_rows * (live // BLOCK)] + 1
    return ids.reshape(num_rows, -1).astype(np.int32)


def scored(num_rows: int, queries: int, live: int, *, from_ring: bool) -> StepPlan:
    """Rows of `live` tokens of which the last `queries` are scored."""
    first = np.arange(num_rows) * (BLOCK if from_ring else queries)
    rows = ScoreRows(
        from_ring=np.full(num_rows, from_ring),
        first_query=first,
        num_queries=np.full(num_rows, queries),
        num_live=np.full(num_rows, live),
        live_table=table(num_rows, live),
        weights=np.ones(queries, dtype=np.float32),
        decay=np.ones(num_rows, dtype=np.float32),
    )
    return StepPlan(scores=(rows,))


def dropped(num_rows: int, live: int, tokens: int) -> StepPlan:
    lives, counts = np.full(num_rows, live), np.full(num_rows, tokens)
    num_tokens = np.full(num_rows, BLOCKS * BLOCK)
    pinned = np.full(num_rows, CONFIG.pinned_tokens)
    return StepPlan(drops=DropRows(lives, counts, table(num_rows, live), num_tokens, pinned))


CASES: dict[str, Callable[[], StepPlan]] = {
    "keep 8 queries": lambda: StepPlan(append_tokens=np.arange(8), append_slots=np.arange(8) * BLOCK),
    "score a block of 1 row, 512 live": lambda: scored(1, BLOCK, 512, from_ring=True),
    "score a block of 8 rows, 512 live": lambda: scored(8, BLOCK, 512, from_ring=True),
    "score a block of 8 rows, 2,048 live": lambda: scored(8, BLOCK, 2048, from_ring=True),
    "score a block of 1 row, 8,192 live": lambda: scored(1, BLOCK, 8192, from_ring=True),
    "score a prompt of 512": lambda: scored(1, 512, 512, from_ring=False),
    "score a prompt of 2,048": lambda: scored(1, 2048, 2048, from_ring=False),
    "defaults: score a prompt of 2,048": lambda: scored(1, 768, 2048, from_ring=False),
    "score 2,048 queries, 8,192 live": lambda: scored(1, 2048, 8192, from_ring=False),
    "drop a block of 8 rows, 544 live": lambda: dropped(8, 544, BLOCK),
    "drop 2,048 of 2,560": lambda: dropped(1, 2560, 2048),
    "defaults: drop a block of 8 rows, 544 live": lambda: dropped(8, 544, BLOCK),
    "defaults: drop 2,048 of 2,560": lambda: dropped(1, 2560, 2048),
}


def measure(
    config: KVPolicyConfig, state: LayerState, plan: StepPlan, query: torch.Tensor, seconds: float
) -> dict[str, float]:
    """Median milliseconds of both implementations, which take turns for about `seconds`."""
    both: tuple[Kernels, ...] = (NativeKernels(config), PlainKernels(config))
    steps = {kernels.name: kernels.prepare(plan) for kernels in both}
    taken: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken["torch"]) < 6:
        for name, step in steps.items():
            started = time.perf_counter()
            step.after_attention(state, query)
            taken[name].append(time.perf_counter() - started)
    native, plain = (1e3 * statistics.median(taken[name][1:]) for name in ("native", "torch"))
    return {"native_ms": native, "torch_ms": plain, "torch_over_native": plain / native}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "kernels.json")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case")
    options = parser.parse_args()
    results: dict[str, dict[str, dict[str, float]]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        paper, pooled = (layer(dtype, positions=positions) for positions in (False, True))
        query = torch.randn(BATCH_TOKENS, KV_HEADS * GROUP, HEAD_SIZE).to(dtype)
        results[name] = {}
        for case, plan in CASES.items():
            config, state = (POOLED, pooled) if case.startswith("defaults") else (CONFIG, paper)
            found = results[name][case] = measure(config, state, plan(), query, options.seconds)
            print(
                f"{name:9} {case:42} native {found['native_ms']:8.3f} ms, torch "
                f"{found['torch_ms']:8.3f} ms, {found['torch_over_native']:.1f} times",
                flush=True,
            )
    content = {
        "date": date.today().isoformat(),
        "machine": f"{machine.describe()}, {torch.get_num_threads()} threads",
        "layer": {"kv_heads": KV_HEADS, "group": GROUP, "head_size": HEAD_SIZE, "block_size": BLOCK},
        "results": results,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
