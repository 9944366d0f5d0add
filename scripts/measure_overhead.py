#!/usr/bin/env python3
"""Measures what the plugin costs while nothing is evicted: start-up time, decode speed, memory.

    python scripts/measure_overhead.py [--runs 5] [--output scripts/results/overhead.json]

Plain vLLM, the policy with scores kept but a budget that is never reached, and the policy with a budget that
makes scores pointless run in turn, each in a fresh process; the figures are medians, and ratios are of runs
next to each other. Run it in the project's environment on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fetch_model
from server_process import HOST, Server, free_port
from setup_steps import OFFLINE_ENVIRONMENT, ROOT

BATCH, CONTEXT_TOKENS, DECODE_STEPS, BLOCK_TOKENS = 8, 2048, 128, 32
KV_CACHE_BYTES = 2 * 1024**3
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    # The budget is never reached by 2,048 + 128 tokens.
    "scored": {"name": "h2o", "budget": 4096},
    "unlimited": {"name": "h2o", "budget": 1.0},
}


def decode_once(variant: str) -> dict[str, float]:
    """In a process of its own: decode speed and memory of one engine (child of ``measure_decode``)."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    policy = VARIANTS[variant]
    llm = LLM(
        str(fetch_model.DEFAULT_TARGET),
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=8192,
        max_num_seqs=BATCH,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        enable_prefix_caching=False,
        additional_config={} if policy is None else {"kv_policy": policy},
        seed=0,
    )
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=DECODE_STEPS, ignore_eos=True, detokenize=False)
    for i in range(BATCH):
        prompt = [(7919 * (i + 1) + 104729 * j) % 40000 + 100 for j in range(CONTEXT_TOKENS)]
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    started = time.perf_counter()
    counts = dict.fromkeys(map(str, range(BATCH)), 0)
    while min(counts.values()) == 0:
        counts.update({o.request_id: len(o.outputs[0].token_ids) for o in engine.step()})
    prefilled = time.perf_counter()
    first = sum(counts.values())
    while engine.has_unfinished_requests() and min(counts.values()) < DECODE_STEPS - BATCH:
        counts.update({o.request_id: len(o.outputs[0].token_ids) for o in engine.step()})
    decoded = time.perf_counter()
    return {
        "prefill_s": prefilled - started,
        "decode_tokens_per_s": (sum(counts.values()) - first) / (decoded - prefilled),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def measure_decode(runs: int) -> dict[str, Any]:
    """Alternate the variants; medians per variant and of the ratio to the plain run of the same round."""
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for run in range(runs):
        for variant in VARIANTS:
            print(f"decode: run {run + 1} of {runs}, {variant}", flush=True)
            command = [sys.executable, __file__, "--decode-once", variant]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=_environment())
            results[variant].append(json.loads(output.stdout.splitlines()[-1]))
    summary: dict[str, Any] = {}
    for variant, measured in results.items():
        summary[variant] = {key: statistics.median(m[key] for m in measured) for key in measured[0]}
        summary[variant]["decode_ratio_to_plain"] = statistics.median(
            m["decode_tokens_per_s"] / p["decode_tokens_per_s"]
            for m, p in zip(measured, results["plain"], strict=True)
        )
        summary[variant]["prefill_ratio_to_plain"] = statistics.median(
            m["prefill_s"] / p["prefill_s"] for m, p in zip(measured, results["plain"], strict=True)
        )
        summary[variant]["runs"] = measured
    return summary


def measure_start_up(runs: int) -> dict[str, Any]:
    """Seconds from starting ``vllm serve`` until /health answers, with and without the policy."""
    seconds: dict[str, list[float]] = {"plain": [], "h2o": []}
    for run in range(runs):
        for variant, flags in (("plain", []), ("h2o", ["--kv-policy", "h2o", "--kv-budget", "512"])):
            print(f"start-up: run {run + 1} of {runs}, {variant}", flush=True)
            port = free_port()
            command = [
                *(str(Path(sys.executable).with_name("vllm")), "serve", str(fetch_model.DEFAULT_TARGET)),
                *("--host", HOST, "--port", str(port), "--enforce-eager", "--max-model-len", "4096"),
                *("--block-size", "32", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), *flags),
            ]
            log = ROOT / ".cache" / f"start-up-{variant}.log"
            log.parent.mkdir(exist_ok=True)
            with Server(command, port=port, log_path=log, environment=_environment()) as server:
                started = time.perf_counter()
                server.wait_until_ready(300)
                seconds[variant].append(time.perf_counter() - started)
    added = [h - p for h, p in zip(seconds["h2o"], seconds["plain"], strict=True)]
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "h2o_s": statistics.median(seconds["h2o"]),
        "added_s": statistics.median(added),
        "runs": seconds,
    }


def memory_formula() -> dict[str, float]:
    """Bytes of scores per 1,000 KV tokens, and of the kept queries, from the model's shape."""
    config = json.loads((fetch_model.DEFAULT_TARGET / "config.json").read_text())
    layers, kv_heads = config["num_hidden_layers"], config["num_key_value_heads"]
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv = 1000 * layers * kv_heads * (hidden // heads) * 2 * 2
    scores = 1000 * layers * kv_heads * 4
    ring_per_request = layers * BLOCK_TOKENS * hidden * 2
    return {
        "kv_bytes_per_1000_tokens": kv,
        "score_bytes_per_1000_tokens": scores,
        "score_share_of_kv": scores / kv,
        "kept_query_bytes_per_request": ring_per_request,
        "kept_queries_as_kv_tokens_per_request": ring_per_request / (kv / 1000),
    }


def _environment() -> dict[str, str]:
    return {**os.environ, **OFFLINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=ROOT / "scripts" / "results" / "overhead.json")
    parser.add_argument("--decode-once", choices=list(VARIANTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode_once:
        print(json.dumps(decode_once(arguments.decode_once)))
        return 0
    result = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "versions": {name: version(name) for name in ("vllm", "torch", "vllm-h2o")},
        "workload": {
            "batch": BATCH,
            "context_tokens": CONTEXT_TOKENS,
            "decode_steps": DECODE_STEPS,
            "dtype": "bfloat16",
        },
        "memory": memory_formula(),
        "decode": measure_decode(arguments.runs),
        "start_up": measure_start_up(arguments.runs),
    }
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
