"""The upstreamable diffs still apply to the vLLM they are made for, and the ledger names them all."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import vllm

PATCHES = Path(__file__).parents[1] / "patches"
ALL = sorted(PATCHES.glob("vllm-*/*.patch"))


def version_of(patch: Path) -> str:
    return patch.parent.name.removeprefix("vllm-")


def apply(patch: Path, tree: Path) -> subprocess.CompletedProcess[str]:
    """Copy the files that a patch touches into ``tree`` and apply it there with no fuzz."""
    for name in re.findall(r"^--- a/(\S+)", patch.read_text(), flags=re.MULTILINE):
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(vllm.__file__).parents[1] / name, target)
    return subprocess.run(
        ["git", "apply", "--verbose", str(patch)], cwd=tree, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: f"{patch.parent.name}-{patch.stem}")
def test_patch_applies(patch: Path, tmp_path: Path) -> None:
    installed = vllm.__version__.split("+")[0]
    if version_of(patch) != installed:
        pytest.skip(f"made for vLLM {version_of(patch)}, installed is {installed}")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    result = apply(patch, tmp_path)
    assert result.returncode == 0, result.stderr
    compile((tmp_path / _touched(patch)).read_text(), str(patch), "exec")


def test_there_are_patches_for_the_installed_version() -> None:
    assert any(version_of(patch) == vllm.__version__.split("+")[0] for patch in ALL)


def test_ledger_and_files_agree() -> None:
    ledger = (PATCHES / "README.md").read_text()
    listed = set(re.findall(r"^\| (\d{4}-[\w-]+) \|", ledger, flags=re.MULTILINE))
    assert listed == {patch.stem for patch in ALL}


def _touched(patch: Path) -> str:
    (name,) = re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), flags=re.MULTILINE)
    return name
