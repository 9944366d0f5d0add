"""The table of extension points matches the installed vLLM, and says so when it doesn't."""

from __future__ import annotations

import pytest

from vllm_h2o.engine.compat import SEAMS, Seam, check_seams
from vllm_h2o.errors import SeamError


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
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


def test_plugin_refuses_to_register_on_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from vllm_h2o.plugin import register

    monkeypatch.delattr(EngineArgs, "from_cli_args")
    with pytest.raises(SeamError, match="from_cli_args"):
        register()
