#!/usr/bin/env python3
"""Checks the tables of extension points against the sources of a vLLM that isn't installed.

    pip download vllm==0.33.0 --no-deps
    python scripts/check_seams.py vllm-0.33.0-cp38-abi3-manylinux.whl     # or a folder that has vllm/ in it
    python scripts/check_seams.py WHEEL --record tests/vllm-seams/0.33.0.json

Nothing of the wheel is run: modules are read as text, names are followed through imports and base classes.
Without arguments the installed vLLM is checked. What is recorded, every extension point with the parameters
that it has, is what tests/test_seams.py holds the table against where that vLLM isn't installed.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Read = Callable[[str], str | None]
"""Text of a file by its path, for instance ``vllm/config.py``; None if there is none."""


def reader(source: Path) -> Read:
    """Of a wheel or a folder."""
    if source.is_dir():

        def from_folder(path: str) -> str | None:
            file = source / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return from_folder
    archive = zipfile.ZipFile(source)
    names = set(archive.namelist())
    return lambda path: archive.read(path).decode("utf-8") if path in names else None


class Sources:
    """Definitions in a tree of modules."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._module = cache(self._parse)

    def _parse(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            text = self._read(candidate)
            if text is not None:
                return ast.parse(text)
        return None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Where a name of a module is defined, and how: through imports, ``if`` and ``try``."""
        tree = self._module(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and name in {ast.unparse(target) for target in node.targets}:
                return module, node
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        inner = self.find(node.module, alias.name)
                        return inner or (module, node)
        return None

    def member(self, module: str, owner: ast.ClassDef, name: str) -> tuple[str, ast.stmt] | None:
        """A method or field of a class or of its bases."""
        for node in owner.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.AnnAssign | ast.Assign):
                targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                if name in map(ast.unparse, targets):
                    return module, node
        for base in owner.bases:
            found = self.find(module, ast.unparse(base).partition("[")[0])
            if found and isinstance(found[1], ast.ClassDef):
                inner = self.member(found[0], found[1], name)
                if inner:
                    return inner
        return None

    def parameters(self, module: str, node: ast.stmt) -> set[str]:
        """Of a function; of a class those of its constructor, or its fields."""
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return {argument.arg for argument in every}
        if not isinstance(node, ast.ClassDef):
            return set()
        fields = {ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)}
        constructor = self.member(module, node, "__init__")
        if constructor:
            fields |= self.parameters(*constructor)
        for base in node.bases:
            found = self.find(module, ast.unparse(base).partition("[")[0])
            fields |= self.parameters(*found) if found else set()
        return fields

    def mismatch(self, path: str, wanted: tuple[str, ...]) -> str | None:
        """Why an extension point ``module:name.member`` doesn't fit; None if it does."""
        present = self.parameters_of(path)
        if present is None:
            return f"{path} is missing"
        missing = set(wanted) - present
        return f"{path} has no parameter {', '.join(sorted(missing))}" if missing else None

    def parameters_of(self, path: str) -> set[str] | None:
        """What an extension point takes, as ``parameters`` says; None if there is none."""
        module, _, names = path.partition(":")
        first, *members = names.split(".")
        found = self.find(module, first)
        for name in members:
            if found is None or not isinstance(found[1], ast.ClassDef):
                break  # what hangs on a function, such as a cache's methods, isn't in the text
            found = self.member(found[0], found[1], name)
        return None if found is None else self.parameters(*found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sources", nargs="*", type=Path, metavar="WHEEL", help="wheels or folders")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write down what one of them has")
    options = parser.parse_args()
    if options.record and len(options.sources) > 1:
        parser.error("--record takes one wheel or folder")
    from vllm_h2o.engine.seams import ALL_SEAMS

    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    wrong = 0
    for source in options.sources or [Path(installed.origin).parents[1]]:
        if not source.exists():
            parser.error(f"{source} is not there")
        sources = Sources(reader(source))
        if options.record:
            found = {seam.path: sorted(sources.parameters_of(seam.path) or ()) for seam in ALL_SEAMS}
            options.record.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        mismatches = [sources.mismatch(s.path, s.parameters) for s in ALL_SEAMS]
        for why in filter(None, mismatches):
            print(f"{source.name}: {why}")
        wrong += sum(map(bool, mismatches))
        print(f"{source.name}: {mismatches.count(None)} of {len(mismatches)} extension points match")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
