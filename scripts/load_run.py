"""One server under its loads: starts `vllm serve`, drives it with `vllm bench serve`, reads its metrics."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import load_dataset
import server_metrics
from load_workload import Flags, Workload, arguments
from server_process import HOST, Server, ServerError, free_port
from setup_steps import OFFLINE_ENVIRONMENT, VENV

RUNNING = "vllm:num_requests_running"
PREEMPTIONS, PROMPT_TOKENS = "vllm:num_preemptions_total", "vllm:prompt_tokens_total"
CACHED_TOKENS = "vllm:prefix_cache_hits_total"
COUNTERS = (PREEMPTIONS, PROMPT_TOKENS, CACHED_TOKENS)

_START_SECONDS = 300.0
_SAMPLING_SECONDS = 0.5  # seldom enough not to slow the server down
_WARM_UP_TOKENS = 4
_WARM_UP_SECONDS = 60.0
_BENCH_FIGURES = (
    *("duration", "completed", "total_input_tokens", "total_output_tokens"),
    *("output_throughput", "total_token_throughput", "request_goodput"),
    *(f"{which}_{what}_ms" for what in ("ttft", "tpot", "itl") for which in ("mean", "median", "p90", "p99")),
)


def run_variant(workload: Workload, variant: str, model: Path, log_path: Path) -> dict[str, dict[str, Any]]:
    """Start the variant's server, run every load on it and stop it.

    Returns:
        Per load the figures of `vllm bench serve` (seconds and milliseconds as in their names), and
        ``peak_running``, ``peak_kv_usage``, ``preemptions`` and ``computed_prompt_tokens`` (all but those
        that the prefix cache had) from the server's metrics.

    Raises:
        ServerError: the server doesn't come up, or a load fails; the message quotes the log.
    """
    port = free_port()
    command = [
        *(str(VENV / "bin" / "vllm"), "serve", str(model), "--host", HOST, "--port", str(port)),
        *arguments(workload.variants[variant]),
    ]
    environment = {**OFFLINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}
    with Server(command, port=port, log_path=log_path, environment=environment) as server:
        server.wait_until_ready(_START_SECONDS)
        figures = {}
        _warm_up(server.url, model)
        for name, load in workload.loads.items():
            print(f"  load {name}", flush=True)
            before = server_metrics.read(server.url, COUNTERS)
            with server_metrics.Peaks(
                server.url, [RUNNING, server_metrics.KV_USAGE], _SAMPLING_SECONDS
            ) as peaks:
                figures[name] = _bench(port, model, load)
            server.check_running(f"under load {name}")
            figures[name]["peak_running"] = peaks.highest[RUNNING]
            figures[name]["peak_kv_usage"] = peaks.highest[server_metrics.KV_USAGE]
            after = server_metrics.read(server.url, COUNTERS)
            grown = {counter: after[counter] - before[counter] for counter in COUNTERS}
            figures[name]["preemptions"] = grown[PREEMPTIONS]
            figures[name]["computed_prompt_tokens"] = grown[PROMPT_TOKENS] - grown[CACHED_TOKENS]
        return figures


def _warm_up(url: str, model: Path) -> None:
    """One short answer, so that no load pays for what a server does once."""
    body = {"model": str(model), "prompt": "Once upon a time", "max_tokens": _WARM_UP_TOKENS}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_WARM_UP_SECONDS):
        pass


def _bench(port: int, model: Path, load: Flags) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(VENV / "bin" / "vllm"), "bench", "serve", "--host", HOST, "--port", str(port)),
            *("--model", str(model), "--percentile-metrics", "ttft,tpot,itl"),
            *("--metric-percentiles", "90,99", "--save-result"),
            *("--result-dir", folder, "--result-filename", "result.json"),
            *arguments(load),
        ]
        if load["dataset-name"] == "sharegpt":
            command += ["--dataset-path", str(load_dataset.write(Path(folder) / "conversations.json"))]
        # What it says besides its progress bar is in the file as well, or of no interest unless it fails.
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment()
        )
        said = _show_progress(process)
        result = Path(folder) / "result.json"
        if process.returncode or not result.exists():
            raise ServerError(f"{' '.join(command)} failed ({process.returncode}).\n{said[-2000:]}")
        figures = json.loads(result.read_text(encoding="utf-8"))
    if figures["completed"] != load["num-prompts"]:
        raise ServerError(f"only {figures['completed']} of {load['num-prompts']} requests were answered")
    return {name: figures[name] for name in _BENCH_FIGURES if figures.get(name) is not None}


def _show_progress(process: subprocess.Popen[str]) -> str:
    """Show a child's progress bar until it ends, and return all that it printed."""
    said = []
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:  # ends at a carriage return, too
                said.append(line)
                if "%|" in line:
                    print(f"\r  {line.rstrip()}", end="", flush=True)
        except BaseException:
            process.terminate()
            raise
    print(flush=True)
    return "".join(said)


def _environment() -> dict[str, str]:
    return {**os.environ, **OFFLINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR"}
