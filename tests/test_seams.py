"""The table of extension points matches the installed vLLM, and says so when it doesn't."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engines import MODEL
from vllm_h2o.engine.compat import SEAMS, WORKER_SEAMS, Seam, check_seams
from vllm_h2o.engine.gpu.compat import GPU_SEAMS
from vllm_h2o.errors import SeamError


@pytest.mark.parametrize("seam", SEAMS + WORKER_SEAMS + GPU_SEAMS, ids=lambda seam: seam.name)
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
