#!/usr/bin/env python3
"""Lays the Python sources of another vLLM over the compiled parts of the installed one, to test with them.

    pip download vllm==0.33.0 --no-deps
    python scripts/overlay_vllm.py vllm-0.33.0-cp38-abi3-manylinux.whl .cache/vllm-0.33.0
    PYTHONPATH=.cache/vllm-0.33.0 python -m pytest tests/engine/test_oracle_agreement.py

There is no wheel of vLLM 0.33 for CPUs. What the plugin touches is Python, so this says a lot about it; it
says nothing about compiled kernels that changed between the two, and what is found holds for CPUs only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def overlay(wheel: Path, target: Path) -> str:
    """Make ``target/vllm`` from the installed package and the wheel's sources.

    Returns:
        The version that it says it is: the wheel's, marked as the CPU's.

    Raises:
        ValueError: the wheel's name has no version of vLLM, or ``target`` is there already.
    """
    named = re.match(r"vllm-([\d.]+)[-+]", wheel.name)
    if named is None:
        raise ValueError(f"{wheel.name} isn't the name of a wheel of vLLM: vllm-VERSION-....whl")
    if target.exists():
        raise ValueError(f"{target} is there already; name another folder, or remove it")
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    shutil.copytree(Path(installed.origin).parent, target / "vllm", ignore=shutil.ignore_patterns("*.py"))
    with zipfile.ZipFile(wheel) as archive:
        sources = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(".py")]
        archive.extractall(target, sources)
    # The platform is told by the distribution's version.
    version = f"{named[1]}+cpu"
    about = target / f"vllm-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
    )
    (target / "vllm" / "_version.py").write_text(
        f'__version__ = version = "{version}"\n__version_tuple__ = version_tuple = '
        f"{tuple(map(int, named[1].split('.')))!r}\n__commit_id__ = commit_id = None\n",
        encoding="utf-8",
    )
    return version


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("target", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    try:
        version = overlay(options.wheel, options.target)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"vLLM {version}: PYTHONPATH={options.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
