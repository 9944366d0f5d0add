"""The script for GPUs runs through at the sizes of a toy, in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "device_check.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_all_checks_pass_in_the_interpreter(tmp_path: Path) -> None:
    output = tmp_path / "device.json"
    done = run("--toy", "--output", str(output), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    assert "Triton's interpreter" in content["device"]
    assert len(content["checks"]) == 7
    scores = [error for name, error in content["checks"].items() if name.startswith("scores")]
    assert len(scores) == 4
    assert all(0 < error < 1e-3 for error in scores), "exact zeros would mean that nothing was compared"


def test_without_a_gpu_it_says_what_to_do() -> None:
    done = run()
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert "TRITON_INTERPRET=1 with --toy" in done.stderr
    assert "Traceback" not in done.stderr
