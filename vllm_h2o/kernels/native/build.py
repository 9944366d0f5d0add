"""Compiles the C++ kernels for this very machine and keeps the result.

No headers but the compiler's own are needed. The library is not linked to an OpenMP runtime: it takes the
one that torch has loaded, and with it the threads that vLLM has bound to cores.
"""

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger("vllm.h2o.kernels")

SOURCES = Path(__file__).parent
# The last one: two builds in one process must not share their static buffers.
_COMPILE_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-gnu-unique")
_LINK_FLAGS = ("-shared",)  # no -fopenmp: it would load a second OpenMP runtime, with threads of its own
_TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels can't be built or loaded here; the message says why."""


def cache_dir() -> Path:
    """Where compiled kernels lie: ``VLLM_H2O_CACHE``, else vllm-h2o in the user's cache folder."""
    given = os.environ.get("VLLM_H2O_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-h2o"


def build() -> Path:
    """Path of the compiled library; compiles it unless the same was compiled before.

    Processes may race: each compiles into a file of its own and renames it.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = _compiler()
    library = cache_dir() / f"kernels-{_key(compiler)}.so"
    if library.exists():
        return library
    logger.info("KV policy: compiling its kernels for this machine (once, a few seconds)")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made, compiled = Path(folder) / library.name, Path(folder) / "step.o"
            _run([*compiler, *_COMPILE_FLAGS, "-c", "-o", str(compiled), str(SOURCES / "step.cpp")])
            _run([*compiler, *_LINK_FLAGS, "-o", str(made), str(compiled)])
            made.replace(library)
    except OSError as error:
        raise BuildError(f"{library.parent} can't be written ({error}); set VLLM_H2O_CACHE") from error
    return library


def _compiler() -> list[str]:
    """g++, or what ``CXX`` names: the runtime that torch brings is GNU's, so it has to be compatible."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if not shutil.which(compiler[0]):
        raise BuildError(f"{compiler[0]} is not there")
    return compiler


def _key(compiler: list[str]) -> str:
    """Names everything that the result depends on, the CPU included: a home folder may be shared."""
    digest = hashlib.sha256()
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + source.read_bytes())
    flags = [*compiler, *_COMPILE_FLAGS, *_LINK_FLAGS]
    digest.update(repr([flags, _run([compiler[0], "--version"]), platform.machine(), _cpu()]).encode())
    return digest.hexdigest()[:16]


def _cpu() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return [platform.processor()]
    names = ("model name", "flags", "Features", "CPU part")
    return sorted({line for line in lines if line.partition(":")[0].strip() in names})


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(command)} took more than {_TIMEOUT_S} s") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout
