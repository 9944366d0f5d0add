#!/usr/bin/env python3
"""Sets up the environment, then runs linters, type checker, tests, and quick load and quality tests.

Arguments go to pytest, and then only pytest runs: `python3 scripts/run_tests.py tests/test_x.py -k
name`. The exit status is that of the first step that fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fetch_model
from setup_env import ensure_environment
from setup_steps import OFFLINE_ENVIRONMENT, ROOT, VENV_PYTHON, SetupError

CHECKS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    # The folders to check are in pyproject.toml.
    ("mypy",),
)


IN_PARALLEL = ("-n", "2", "--dist", "loadfile")
"""Two processes, a core and a thread each; a file's tests stay together: they share what they prepare."""

UNIT_TESTS = ("--ignore=tests/engine", "--ignore=tests/e2e")
ALL_CORES_TESTS = (
    *("tests/engine/test_tensor_parallel.py", "tests/e2e/test_endpoint.py", "tests/e2e/test_ray.py"),
)
"""One after the other: they start several processes that compute."""
ENGINE_TESTS = ("tests/engine", "tests/e2e", *(f"--ignore={path}" for path in ALL_CORES_TESTS))

INTERPRETED_TESTS = (
    *("tests/test_triton.py", "tests/test_triton_steps.py", "tests/test_scoring.py"),
    *("tests/test_compaction.py", "tests/test_ranks.py"),
    *("-k", "triton"),
)
"""Tests of the Triton kernels in Triton's interpreter, which takes over a whole process."""


def _pytest(arguments: list[str], **variables: str) -> int:
    print(f"\n==> pytest {' '.join(arguments)}", flush=True)
    environment = {**os.environ, **OFFLINE_ENVIRONMENT, **variables}
    environment["VLLM_H2O_MODEL"] = str(fetch_model.DEFAULT_TARGET)
    command = [str(VENV_PYTHON), "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _run(*command: str) -> int:
    # Before the child prints, so that a log which both write to is in order.
    print(f"\n==> {' '.join(command)}", flush=True)
    return subprocess.run([str(VENV_PYTHON), "-m", *command], cwd=ROOT).returncode


def main(pytest_arguments: list[str]) -> int:
    """Run every step, or with arguments only pytest, and return the exit status."""
    if pytest_arguments in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    try:
        ensure_environment({"model", "test", "bench"})
    except SetupError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    # As a process of its own: this one may be the bare Python, which can't convert the model.
    script = Path(__file__).with_name("fetch_model.py")
    if status := subprocess.run([str(VENV_PYTHON), str(script)]).returncode:
        return status
    for check in () if pytest_arguments else CHECKS:
        if status := _run(*check):
            return status
    if pytest_arguments:
        return _pytest(pytest_arguments)
    status = (
        _pytest([*IN_PARALLEL, *UNIT_TESTS])
        or _pytest([*IN_PARALLEL, *INTERPRETED_TESTS], TRITON_INTERPRET="1")
        or _pytest([*IN_PARALLEL, *ENGINE_TESTS])
        or _pytest([*ALL_CORES_TESTS])
    )
    if status:
        return status
    # They fail when serving has become slower than the floors in configs/load/quick.yaml, or answers have
    # become worse than configs/quality/quick.yaml expects.
    for name, results in (("load_test", ".cache/load"), ("eval_quality", ".cache/quality")):
        print(f"\n==> {name}.py --quick", flush=True)
        command = [str(VENV_PYTHON), f"scripts/{name}.py", "--quick", "--results", results]
        if status := subprocess.run(command, cwd=ROOT).returncode:
            return status
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
