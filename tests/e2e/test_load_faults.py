"""A load test whose second server fails: the error says why, no server is left, the first result stays."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import psutil
import pytest

import load_test
from server_process import ServerError

pytestmark = pytest.mark.e2e

WORKLOAD = """
description: the second server can't be started
server: {max-model-len: 256, num-gpu-blocks-override: 33, max-num-seqs: 2}
variants:
  good: {}
  bad: {kv-policy: h2o, kv-budget: 7, kv-recent: 7}
loads:
  short: {num-prompts: 2, random-input-len: 16, random-output-len: 4}
compare:
  - {name: bad / good, of: bad, to: good}
"""


def servers() -> set[int]:
    """Process ids of all vLLM servers, and of their engines."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        words = " ".join(process.info["cmdline"] or ())
        if "vllm serve" in words or "VLLM::" in words:
            found.add(process.info["pid"])
    return found


def test_partial_results_stay_and_no_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "ROOT", tmp_path)  # where logs go
    path = tmp_path / "faulty.yaml"
    path.write_text(WORKLOAD, encoding="utf-8")
    before = servers()
    options = argparse.Namespace(results=tmp_path / "found", rounds=1, add=False)
    with pytest.raises(
        ServerError, match=r"(?s)the server exited while starting.*--kv-budget='7'.*Give at least"
    ):
        load_test.run(path, options)
    assert servers() <= before
    found = json.loads((tmp_path / "found" / "faulty.json").read_text(encoding="utf-8"))
    assert found["complete"] is False
    assert list(found["rounds"][0]["servers"]) == ["good"]
    assert found["medians"]["good"]["short"]["completed"] == 2
    assert "partial: 0 of 1 rounds" in (tmp_path / "found" / "faulty.md").read_text(encoding="utf-8")
