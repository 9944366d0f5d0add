"""One run of a peer: a process of its own in the peer's environment. Standard library only."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer_error import PeerError
from peer_workload import PROJECT_PEERS, Task

LOG_LINES = 15
SCRIPTS = Path(__file__).parent


def run(
    task: Task, python: Path, log_path: Path, variables: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """The figures that a peer prints for a task.

    Args:
        log_path: gets what the peer writes to its standard error.
        variables: on top of this process's environment.

    Raises:
        PeerError: it failed, took too long or printed no figures; the message quotes the log.
    """
    peer = task.variant.peer
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        try:
            done = subprocess.run(
                [str(python), str(SCRIPTS / f"peer_{peer}.py")],
                input=json.dumps(task.to_json()),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=timeout_s,
                env={**os.environ, **variables},
            )
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"{task.variant.label}: not done after {timeout_s:.0f} s. Give it fewer requests "
                "with --requests, or more time with --timeout."
            ) from None
        except OSError as error:
            raise PeerError(f"{task.variant.label}: its Python can't be run: {error}") from error
    lines = done.stdout.splitlines()
    if done.returncode == 0 and lines:
        try:
            figures = json.loads(lines[-1])
        except json.JSONDecodeError:
            figures = None
        if isinstance(figures, dict):
            return figures
    raise PeerError(_explain(task, log_path, done.returncode))


def run_or_shrink(
    task: Task, python: Path, log_path: Path, variables: Mapping[str, str], timeout_s: float
) -> dict[str, Any]:
    """As ``run``; what fails in a batch, for example for want of memory, is tried again one by one."""
    try:
        return run(task, python, log_path, variables, timeout_s)
    except PeerError:
        # A variant of `hf` is one of several batch sizes, so the smaller one is there already.
        if task.variant.batch <= 1 or task.variant.peer == "hf":
            raise
    print("  failed in a batch; trying one request at a time", flush=True)
    alone = replace(task, variant=replace(task.variant, batch=1))
    return run(alone, python, log_path, variables, timeout_s)


def _explain(task: Task, log_path: Path, status: int) -> str:
    """One line that says all, and below it the end of the log."""
    peer = task.variant.peer
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    last = lines[-1].strip()[:200] if lines else "it wrote nothing"
    if any(name in last for name in ("ModuleNotFoundError", "ImportError", "PackageNotFoundError")):
        fix = (
            "Give --vllm-python a Python that has vLLM and the plugin, or leave it out"
            if peer in PROJECT_PEERS
            else f"Remove .cache/peers/{peer} to have its environment made again"
        )
    elif status == -9:
        fix = "It was killed, most likely for want of memory"
    else:
        fix = "Leave it out with --peers to measure the others"
    first = (
        f"{task.variant.label}: peer_{peer}.py failed ({status}): {last}. {fix}; its log is {log_path.name}."
    )
    return "\n".join((first, *lines))
