"""The table of extension points matches the installed vLLM, and says so when it doesn't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vllm

import check_seams as check_seams_script
from tests.engines import MODEL
from vllm_h2o.engine.seams import ALL_SEAMS, SEAMS, SUPPORTED_VLLM, Seam, check_seams
from vllm_h2o.errors import SeamError


@pytest.mark.parametrize("seam", ALL_SEAMS, ids=lambda seam: seam.name)
def test_seam_matches_installed_vllm(seam: Seam) -> None:
    assert seam.mismatch() is None
    assert seam.purpose


def test_every_mismatch_is_named() -> None:
    wrong = (
        Seam("vllm.v1.request:Request.no_such_method", (), "test"),
        Seam("vllm.no_such_module:Thing", (), "test"),
        Seam("vllm.engine.arg_utils:EngineArgs.from_cli_args", ("args", "no_such_parameter"), "test"),
        Seam("vllm.config:ParallelConfig", ("no_such_field",), "test"),
    )
    with pytest.raises(SeamError) as error:
        check_seams((*SEAMS, *wrong))
    for name in ("no_such_method", "no_such_module", "no_such_parameter", "no_such_field", "0.32", "0.33"):
        assert name in str(error.value)
    assert "determine_available_memory" not in str(error.value), "seams that match are not named"


def test_on_a_mismatch_only_policies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who uses no policy keeps a working vLLM."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    from vllm_h2o.plugin import register

    load_general_plugins()  # what later tests rely on, and happens once in a process
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: "vLLM's own")
    monkeypatch.delattr(EngineArgs, "from_cli_args")
    register()
    assert EngineArgs(model=MODEL).create_engine_config() == "vLLM's own"
    with pytest.raises(SeamError, match="from_cli_args"):
        EngineArgs(model=MODEL, additional_config={"kv_policy": "h2o"}).create_engine_config()


def test_loading_the_plugin_leaves_torch_alone() -> None:
    """vLLM's CPU worker replaces functions of torch on import; only a worker process may see that."""
    script = """
import sys, torch
from vllm.engine.arg_utils import EngineArgs
before = torch.cuda.Event, torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory
from vllm_h2o.plugin import register
register()
assert hasattr(EngineArgs.create_engine_config, "__vllm_h2o__"), "not installed"
assert "vllm.v1.worker.cpu_worker" not in sys.modules
after = torch.cuda.Event, torch.cuda.Stream, torch.accelerator.synchronize, torch.Tensor.pin_memory
assert after == before
"""
    environment = {**os.environ, "VLLM_PLUGINS": ""}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


def test_the_sources_of_the_installed_vllm_match() -> None:
    """As the script for wheels reads them: it must find what importing finds."""
    command = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "check_seams.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
    count = len(ALL_SEAMS)
    assert f"{count} of {count} extension points match" in done.stdout


RECORDED = sorted((Path(__file__).parent / "vllm-seams").glob("*.json"))


def test_every_supported_version_is_recorded() -> None:
    assert [".".join(path.stem.split(".")[:2]) for path in RECORDED] == list(SUPPORTED_VLLM)


@pytest.mark.parametrize("record", RECORDED, ids=lambda path: path.stem)
def test_the_table_matches_what_a_version_has(record: Path) -> None:
    """Versions that aren't installed here, too; a new extension point has to be looked up in all of them."""
    recorded = json.loads(record.read_text(encoding="utf-8"))
    again = f"run scripts/check_seams.py with --record on vLLM {record.stem}"
    assert {seam.path for seam in ALL_SEAMS} == set(recorded), again
    for seam in ALL_SEAMS:
        assert set(seam.parameters) <= set(recorded[seam.path]), seam.name


def test_the_record_of_the_installed_version_is_what_it_has(tmp_path: Path) -> None:
    """So the script's way to record is right, and nobody has written into the file by hand."""
    command = [sys.executable, str(Path(__file__).parents[1] / "scripts" / "check_seams.py")]
    subprocess.run([*command, "--record", str(tmp_path / "found.json")], check=True, timeout=200)
    (record,) = [path for path in RECORDED if path.stem == vllm.__version__.split("+")[0]]
    assert (tmp_path / "found.json").read_text() == record.read_text()


@pytest.mark.parametrize(
    ("path", "parameters", "found"),
    [
        ("pkg.a:function", ("x", "y"), None),
        ("pkg.a:function", ("x", "z"), "pkg.a:function has no parameter z"),
        ("pkg.a:Derived.inherited", ("value",), None),
        ("pkg.a:Derived.overridden", ("value",), "pkg.a:Derived.overridden has no parameter value"),
        ("pkg.a:Derived.missing", (), "pkg.a:Derived.missing is missing"),
        ("pkg.a:Derived", ("size", "color"), None),
        ("pkg.a:Derived.color", (), None),
        ("pkg.a:Gone", (), "pkg.a:Gone is missing"),
        ("pkg.gone:Thing", (), "pkg.gone:Thing is missing"),
    ],
)
def test_extension_points_are_found_in_text(
    path: str, parameters: tuple[str, ...], found: str | None, tmp_path: Path
) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from pkg.base import Base\n")
    (package / "base.py").write_text(
        "class Base:\n    size: int\n"
        "    def inherited(self, value): ...\n    def overridden(self, value): ...\n"
    )
    (package / "a.py").write_text(
        "from pkg import Base\n\ndef function(x, *, y): ...\n\n"
        "class Derived(Base[int]):\n    color: str\n    def overridden(self, other): ...\n"
    )
    assert check_seams_script.Sources(check_seams_script.reader(tmp_path)).mismatch(path, parameters) == found
    wheel = tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.iterdir():
            archive.write(file, f"pkg/{file.name}")
    assert check_seams_script.Sources(check_seams_script.reader(wheel)).mismatch(path, parameters) == found
