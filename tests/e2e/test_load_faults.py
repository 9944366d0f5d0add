"""A load test whose second server fails: the error says why, no server is left, the first result stays."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path

import psutil
import pytest

import load_run
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


MARK = "VLLM_H2O_LOAD_FAULTS"


def servers(mark: str) -> list[list[str]]:
    """Command lines of the processes, but for this one, that were started with the mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process.cmdline())
    return found


def test_partial_results_stay_and_no_server_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_test, "ROOT", tmp_path)  # where logs go
    path = tmp_path / "faulty.yaml"
    path.write_text(WORKLOAD, encoding="utf-8")
    mark = str(tmp_path)
    monkeypatch.setenv(MARK, mark)  # children inherit it, and theirs
    options = argparse.Namespace(results=tmp_path / "found", rounds=1, add=False)
    seen: list[list[str]] = []
    monkeypatch.setattr(load_run, "_warm_up", lambda *args: seen.extend(servers(mark)))
    with pytest.raises(
        ServerError, match=r"(?s)the server exited while starting.*--kv-budget='7'.*Give at least"
    ):
        load_test.run(path, options)
    assert any("serve" in words for words in seen), "this can't tell servers"
    assert servers(mark) == []
    found = json.loads((tmp_path / "found" / "faulty.json").read_text(encoding="utf-8"))
    assert found["complete"] is False
    assert list(found["rounds"][0]["servers"]) == ["good"]
    assert found["medians"]["good"]["short"]["completed"] == 2
    assert "partial: 0 of 1 rounds" in (tmp_path / "found" / "faulty.md").read_text(encoding="utf-8")
