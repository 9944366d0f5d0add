"""A directory that appears whole or not at all, with a manifest to check it by.

Standard library only: `fetch_model.py` asks this module first whether there is anything to do, and
that question has to be cheap (no NumPy, no torch) because every quickstart and test run asks it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST_NAME = "h2o-manifest.json"

# Files up to this size are hashed on every check (a few milliseconds); a larger one, that is the
# weights, is only measured, so that a second run stays well under a second. `verify=True` hashes
# everything.
HASH_ALWAYS_UP_TO_BYTES = 8 * 1024 * 1024

_CHUNK_BYTES = 1024 * 1024


class StoreError(Exception):
    """Something is wrong with a file or directory; the message says what and how to fix it."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raise StoreError naming both hashes unless `path` has the SHA-256 `expected`."""
    actual = file_sha256(path)
    if actual != expected:
        raise StoreError(
            f"{path.name} is not the file this script was written for: expected sha256 {expected}, "
            f"got {actual}. Delete {path} (or clear the download cache with `pip cache purge`) "
            "and run the command again."
        )


def write_manifest(directory: Path, facts: dict[str, Any]) -> None:
    """Record `facts` and the size and SHA-256 of every file in `directory` in its manifest."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.iterdir())
        if path.name != MANIFEST_NAME
    }
    manifest = {**facts, "files": files}
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def problem_with(directory: Path, facts: dict[str, Any], *, verify: bool = False) -> str | None:
    """Return why `directory` cannot be used as it is, or None if it is complete.

    `facts` is what the manifest has to say (the source, the data type and so on). With `verify`
    every file is hashed; otherwise only the small ones are.
    """
    path = directory / MANIFEST_NAME
    if not path.is_file():
        return f"{directory} has no {MANIFEST_NAME}"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = manifest["files"]
        for key, wanted in facts.items():
            if manifest.get(key) != wanted:
                return f"{key} is {manifest.get(key)!r}, wanted {wanted!r}"
        for name, record in files.items():
            if problem := _problem_with_file(directory / name, record, verify=verify):
                return problem
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return f"{path} is damaged ({type(error).__name__}: {error})"
    return None


def _problem_with_file(path: Path, record: dict[str, Any], *, verify: bool) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    size = path.stat().st_size
    if size != record["bytes"]:
        return f"{path.name} has {size} bytes, the manifest says {record['bytes']}"
    must_hash = verify or size <= HASH_ALWAYS_UP_TO_BYTES
    if must_hash and file_sha256(path) != record["sha256"]:
        return f"{path.name} does not have the sha256 that the manifest gives"
    return None


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Yield a scratch directory beside `target` that replaces it when the block succeeds.

    Until then `target` is untouched; if the block raises, the scratch directory is removed. The
    caller holds the lock, so any older scratch directory belongs to a run that was killed.
    """
    prefix = f".{target.name}.tmp-"
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale)
    # Beside the target, not in the system's temp folder: a rename is atomic on one file system only
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        # mkdtemp makes a private directory; the model may be served by another user.
        scratch.chmod(0o755)
        yield scratch
        if target.exists():
            # A directory with files in it can't be renamed over, so the old one steps aside into
            # a name that the next run would also clear.
            os.rename(target, Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent)) / "old")
        os.rename(scratch, target)
    finally:
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left)
