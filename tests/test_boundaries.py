"""Who may import what: most of the package has to work, and be tested, without vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_h2o

PACKAGE = Path(vllm_h2o.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
MAX_LINES = 300


def is_engine(module: str) -> bool:
    return module.startswith("engine/")


def imports(tree: ast.AST, module: str = "") -> Iterator[str]:
    """Full names of all modules imported anywhere below `tree`, relative ones resolved."""
    package = ["vllm_h2o", *Path(module).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            # `from package import module` imports the module as well.
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            # By name: import_module("vllm.x"), __import__("vllm").
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value)


def top_level_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those in classes and blocks included."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from top_level_statements(child)


def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(encoding="utf-8"))


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_all_modules_are_looked_at() -> None:
    assert {"plugin.py", "retention.py", "policies/h2o.py", "engine/compat.py"} <= set(MODULES)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vllm.config as c", ["vllm.config"]),
        ("from vllm import LLM", ["vllm.LLM"]),
        ("def f():\n    if x:\n        import vllm", ["vllm"]),
        ("from . import scoring", ["vllm_h2o.engine.scoring"]),
        ("from ..layout import PagedLayer", ["vllm_h2o.layout.PagedLayer"]),
        ("importlib.import_module('vllm.config')", ["vllm.config"]),
        ("import vllm_h2o.config", ["vllm_h2o.config"]),
    ],
)
def test_imports_are_found(source: str, found: list[str]) -> None:
    assert list(imports(ast.parse(source), "engine/x.py")) == found


@pytest.mark.parametrize("module", [module for module in MODULES if not is_engine(module)])
def test_only_engine_and_plugin_import_vllm(module: str) -> None:
    allowed = module == "plugin.py"
    for name in imports(parse(module), module):
        assert allowed or not within(name, "vllm"), name
        # Whoever imports `engine` imports vLLM with it.
        assert allowed or not within(name, "vllm_h2o.engine"), name


def test_plugin_imports_vllm_only_inside_functions() -> None:
    """vLLM finds plugins while it is still being imported itself."""
    tree = parse("plugin.py")
    assert any(within(name, "vllm_h2o.engine") for name in imports(tree, "plugin.py"))
    for statement in top_level_statements(tree):
        for name in imports(statement, "plugin.py"):
            assert not within(name, "vllm"), name
            assert not within(name, "vllm_h2o.engine"), name


@pytest.mark.parametrize(
    "module", ["retention.py", "config.py", "settings.py", "errors.py", "query_ring.py", "policies/h2o.py"]
)
def test_arithmetic_needs_neither_torch_nor_vllm(module: str) -> None:
    for name in imports(parse(module), module):
        assert not within(name, "torch"), name
        assert not within(name, "vllm"), name


@pytest.mark.parametrize("module", ["vllm_h2o", "vllm_h2o.config", "vllm_h2o.retention", "vllm_h2o.plugin"])
def test_importing_loads_neither_torch_nor_vllm(module: str) -> None:
    """What reads the configuration must not cost the seconds that torch takes, nor start its threads."""
    script = f"import sys, {module}; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_short(module: str) -> None:
    lines = (PACKAGE / module).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES, f"{module} has {len(lines)} lines: split it by what it does"
