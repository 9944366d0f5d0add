#!/usr/bin/env python3
"""Where the time of a step goes: plain vLLM, the paper's settings and the defaults of h2o.

    python scripts/profile_steps.py [--runs 3] [--output scripts/results/profile.json]

One engine at a time runs in this process, with timers around the parts of a step that the policy touches:
the scheduler, building the attention metadata, vLLM's attention kernels, and what the layers do after them.
Each variant gets a fresh process per run and takes turns with the others; figures are medians over the runs,
in milliseconds per step. Run it in the project's environment on an idle machine, with OMP_NUM_THREADS set to
the number of cores to use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fetch_model
import machine
from setup_steps import OFFLINE_ENVIRONMENT, ROOT

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS, BLOCK_TOKENS = 16, 512, 256, 32
PAPER = {"name": "h2o", "preset": "paper", "pin_tokens": 32}
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "paper, nothing evicted": {**PAPER, "budget": 1024},
    "h2o, nothing evicted": {"name": "h2o", "budget": 1024},
    "paper, budget 256": {**PAPER, "budget": 256},
    "h2o, budget 256": {"name": "h2o", "budget": 256},
}
PARTS = ("scheduler", "metadata", "attention", "after attention", "step")


class Timers:
    """Seconds spent in each part, without what lies inside a part that is timed as well."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        self._inner.append(0.0)
        yield
        taken = time.perf_counter() - started
        self.seconds[name] += taken - self._inner.pop()
        self._inner[-1] += taken

    def wrap(self, owner: Any, method: str, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def profile_once(variant: str) -> dict[str, dict[str, float]]:
    """In a process of its own: milliseconds per prefill step and per decode step, by part."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

    policy = VARIANTS[variant]
    llm = LLM(
        str(fetch_model.DEFAULT_TARGET),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=2048,
        max_num_seqs=BATCH,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        additional_config={} if policy is None else {"kv_policy": policy},
        seed=0,
    )
    timers = Timers()
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    timers.wrap(core.scheduler, "schedule", "scheduler")
    timers.wrap(core.scheduler, "update_from_output", "scheduler")
    timers.wrap(CPUAttentionBackendImpl, "forward", "attention")
    if policy is None:
        timers.wrap(CPUAttentionMetadataBuilder, "build", "metadata")
    else:
        from vllm_h2o.engine.builder import H2OCPUMetadataBuilder, StepWork

        timers.wrap(H2OCPUMetadataBuilder, "build", "metadata")
        timers.wrap(StepWork, "run", "after attention")
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
    for i in range(BATCH):
        prompt = [(7919 * (i + 1) + 104729 * j) % 40000 + 100 for j in range(PROMPT_TOKENS)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    found = {}
    for phase, num_steps in (("prefill", BATCH * PROMPT_TOKENS // 2048), ("decode", OUTPUT_TOKENS - 1)):
        timers.seconds = dict.fromkeys(PARTS, 0.0)
        for _ in range(num_steps):
            with timers.part("step"):
                engine.step()
        found[phase] = {part: 1e3 * seconds / num_steps for part, seconds in timers.seconds.items()}
        found[phase]["rest"] = found[phase].pop("step")
        found[phase]["total"] = sum(found[phase].values())
    return found


def table(medians: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown, one line per phase and variant."""
    columns = (*PARTS[:-1], "rest", "total")
    lines = ["| phase | server | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for phase in ("prefill", "decode"):
        for variant, phases in medians.items():
            cells = (f"{phases[phase][column]:.2f}" for column in columns)
            lines.append(f"| {phase} | {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "profile.json")
    parser.add_argument("--once", choices=list(VARIANTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(profile_once(options.once)))
        return 0
    runs: dict[str, list[dict[str, dict[str, float]]]] = {variant: [] for variant in VARIANTS}
    environment = {**os.environ, **OFFLINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
    for run in range(options.runs):
        for variant in VARIANTS:
            print(f"run {run + 1} of {options.runs}: {variant}", flush=True)
            command = [sys.executable, __file__, "--once", variant]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            runs[variant].append(json.loads(output.stdout.splitlines()[-1]))
    medians = {
        variant: {
            phase: {part: statistics.median(run[phase][part] for run in of) for part in of[0][phase]}
            for phase in of[0]
        }
        for variant, of in runs.items()
    }
    content = {
        "date": date.today().isoformat(),
        "machine": machine.describe(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-h2o")},
        "load": f"{BATCH} requests of {PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens, bfloat16, eager",
        "medians_ms_per_step": medians,
        "runs": runs,
    }
    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(table(medians) + "\n", encoding="utf-8")
    print(table(medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
