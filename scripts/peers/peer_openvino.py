"""OpenVINO GenAI: continuous batching over a pool of KV blocks, with and without its own cache eviction.

Its eviction drops whole blocks by summed attention, after the prompt and during decoding; what isn't set here
is as OpenVINO has it by default.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai as genai

import peer_protocol
from peer_protocol import Phases, Watch
from peer_workload import (
    BLOCK_TOKENS,
    MAX_BATCHED_TOKENS,
    WARM_UP_TOKENS,
    Task,
    prompts,
    recent_tokens,
    warm_up_prompt,
)

_RECENT_TOKENS = 128


def converted(model: Path, cache: Path) -> Path:
    """The folder of the model in OpenVINO's own format, made when it isn't there (about a minute)."""
    # Whatever changes the result is in the name, so that a folder with the name is always the right one.
    parts = [version("openvino"), version("optimum-intel"), *_content(model)]
    target = cache / f"openvino-model-{hashlib.sha256(repr(parts).encode()).hexdigest()[:12]}"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        # In a process of its own, whose memory isn't counted. float16 is for the file; what the CPU
        # computes with is said when the model is loaded.
        command = [
            *(str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"),
            *("--model", str(model), "--task", "text-generation-with-past", "--weight-format", "fp16"),
            str(Path(folder) / "model"),
        ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        shutil.move(Path(folder) / "model", target)
    return target


def _content(model: Path) -> list[tuple[str, int, int]]:
    files = sorted(path for path in model.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def scheduler(task: Task) -> genai.SchedulerConfig:
    """A pool of exactly the workload's tokens."""
    config = genai.SchedulerConfig()
    config.num_kv_blocks = task.workload.pools[task.variant.pool] // BLOCK_TOKENS
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.max_num_seqs = task.workload.requests
    config.dynamic_split_fuse = True
    config.enable_prefix_caching = False
    config.use_cache_eviction = task.variant.evicts
    if task.variant.evicts:
        budget = task.workload.budget_tokens
        config.cache_eviction_config = genai.CacheEvictionConfig(
            start_size=BLOCK_TOKENS,
            recent_size=recent_tokens(budget, _RECENT_TOKENS),
            max_cache_size=budget,
            aggregation_mode=genai.AggregationMode.NORM_SUM,
        )
    return config


def measure(task: Task) -> tuple[list[Phases], dict[str, Any]]:
    """Run the task; its phases, and how full the pool was at most."""
    folder = converted(Path(task.model), Path(task.cache))
    properties = {
        "INFERENCE_PRECISION_HINT": "bf16",
        # On CPUs it is u8 by default, which would be half the memory for the same pool.
        "KV_CACHE_PRECISION": "bf16",
        "INFERENCE_NUM_THREADS": task.threads,
    }
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler(task), "CPU", properties)
    _run(pipeline, [warm_up_prompt(task)], WARM_UP_TOKENS[1])
    phases = _run(pipeline, prompts(task), task.workload.output_tokens)
    metrics = pipeline.get_metrics()
    return [phases], {
        "peak_pool_use": metrics.max_cache_usage / 100,
        "pool_bytes": metrics.kv_cache_size_in_bytes,
    }


def _run(pipeline: Any, wanted: list[list[int]], output_tokens: int) -> Phases:
    config = genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    watch = Watch(len(wanted))
    handles = [
        pipeline.add_request(i, openvino.Tensor(numpy.array([ids], dtype=numpy.int64)), config)
        for i, ids in enumerate(wanted)
    ]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        for i, handle in enumerate(handles):
            while handle.can_read():
                watch.counts[i] += sum(len(part.generated_ids) for part in handle.read().values())
        watch.look()
    return watch.stop(output_tokens)


if __name__ == "__main__":
    peer_protocol.main(measure, ["openvino-genai", "openvino", "optimum-intel", "transformers", "torch"])
