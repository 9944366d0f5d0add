"""The environment of each peer: the project's own for vLLM, one under `.cache/peers` for each of the others.

Standard library only, since it runs on the bare Python that a machine comes with.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import fetch_model
import model_store
from file_lock import locked
from peer_error import PeerError
from peer_workload import PROJECT_PEERS
from setup_env import ensure_environment
from setup_steps import (
    LEFT_OUT,
    OFFLINE_ENVIRONMENT,
    ROOT,
    TORCH,
    TORCH_CPU_INDEX,
    VENV_PYTHON,
    SetupError,
)

CACHE = ROOT / ".cache" / "peers"

_STAMP = "h2o-peer-complete"
_FREE_BYTES_NEEDED = 3 * 1024**3


def ensure_model() -> Path:
    """The folder of the test model, which is made when it isn't complete.

    Raises:
        SetupError, StoreError: it can't be made.
    """
    target = fetch_model.DEFAULT_TARGET
    if model_store.problem_with(target, fetch_model.manifest_facts("bfloat16"), verify=False) is not None:
        ensure_environment({"model"})
        script = Path(fetch_model.__file__)
        if subprocess.run([str(VENV_PYTHON), str(script)]).returncode != 0:
            raise SetupError(f"the test model could not be made (the message of {script.name} is above)")
    return target


def ensure_python(peer: str, vllm_python: Path | None = None) -> Path:
    """The Python of a peer's environment, which is made when it isn't there.

    Args:
        vllm_python: has vLLM and the plugin, in place of the project's environment.

    Raises:
        PeerError: it can't be made.
    """
    if peer not in PROJECT_PEERS:
        return _ensure_venv(peer)
    if vllm_python is not None:
        return vllm_python
    try:
        ensure_environment({"model"})
    except SetupError as error:
        raise PeerError(f"{peer}: {error}") from error
    return VENV_PYTHON


def requirements_path(peer: str) -> Path:
    """The pinned packages of a peer with an environment of its own."""
    return Path(__file__).with_name(f"requirements-{peer}.txt")


def _ensure_venv(peer: str) -> Path:
    venv = CACHE / peer
    python, stamp, key = venv / "bin" / "python", venv / _STAMP, _key(peer)
    CACHE.mkdir(parents=True, exist_ok=True)
    with locked(CACHE / f"{peer}.lock", waiting_for=f"setting up the peer {peer}"):
        if python.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == key:
            return python
        if venv.exists():
            print(f"Removing the outdated or unfinished {venv}", flush=True)
            shutil.rmtree(venv)
        free = shutil.disk_usage(CACHE).free
        if free < _FREE_BYTES_NEEDED:
            raise PeerError(
                f"{peer}: {CACHE} has {free / 1024**3:.1f} GiB free; its environment and what pip keeps "
                f"while making it need {_FREE_BYTES_NEEDED / 1024**3:.0f} GiB. Free some space."
            )
        print(f"Setting up the peer {peer} in {venv}", flush=True)
        # Not from the environment that this may run in, which may be removed before this one.
        base_python = getattr(sys, "_base_executable", sys.executable)
        _check(peer, [base_python, "-m", "venv", str(venv)])
        _install(peer, python)
        stamp.write_text(key, encoding="utf-8")
    return python


def _key(peer: str) -> str:
    """What an environment is made from; its place too, since it doesn't survive being moved."""
    parts = (requirements_path(peer).read_text(encoding="utf-8"), TORCH, *LEFT_OUT, str(CACHE))
    return hashlib.sha256("\0".join((*parts, platform.python_version())).encode()).hexdigest()


def _install(peer: str, python: Path) -> None:
    """As setup_steps.py does it: torch's CPU build first, so that no later step takes the CUDA one."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    first = subprocess.run([*pip, "install", "--quiet", "--no-deps", TORCH])
    if first.returncode != 0:
        print(f"Not where pip looks by default; taking {TORCH} from {TORCH_CPU_INDEX}", flush=True)
        _check(peer, [*pip, "install", "--no-deps", TORCH, "--index-url", TORCH_CPU_INDEX])
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(f"{TORCH}\n", encoding="utf-8")
        requirements = str(requirements_path(peer))
        _check(peer, [*pip, "install", "--requirement", requirements, "--constraint", str(constraints)])
    # optimum-intel asks for torchvision, whose usual build fails beside the CPU build of torch when
    # Transformers imports it; without it Transformers does without.
    _check(peer, [*pip, "uninstall", "--quiet", "--yes", *LEFT_OUT])


def _check(peer: str, command: list[str]) -> None:
    if subprocess.run(command).returncode != 0:
        raise PeerError(
            f"{peer}: `{' '.join(command)[:300]}` failed (its message is above). Check that this machine "
            f"reaches PyPI or a mirror of it and that {requirements_path(peer).name} names what is there, or "
            "leave the peer out with --peers."
        )


def environment(threads: int) -> dict[str, str]:
    """What every peer's process gets on top of this one's environment variables."""
    return {
        **OFFLINE_ENVIRONMENT,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
