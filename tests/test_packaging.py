"""What is installed is complete."""

from __future__ import annotations

import tomllib
from pathlib import Path

import vllm_h2o

PACKAGE = Path(vllm_h2o.__file__).parent


def test_every_file_that_is_not_python_is_listed() -> None:
    """Such files are installed only where pyproject.toml names them."""
    pyproject = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    listed = {
        path
        for package, patterns in pyproject["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in (PACKAGE.parent / package.replace(".", "/")).glob(pattern)
    }
    present = {
        path
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts
    }
    assert listed == present
