"""The peers' scripts without any peer: prompts, variants, figures, tables, failures.

That the peers themselves run is shown by `scripts/peers/run_peers.py --quick`.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import peer_process
import peer_protocol
import peer_report
import peer_setup
import run_peers
from peer_error import PeerError
from peer_protocol import Phases
from peer_workload import (
    BLOCK_TOKENS,
    PEERS,
    PROJECT_PEERS,
    WORKLOADS,
    Task,
    Variant,
    Workload,
    prompt,
    prompts,
    recent_tokens,
    variants,
    warm_up_prompt,
)
from setup_steps import TORCH_VERSION

ALL = [*WORKLOADS.values(), *(workload.quick() for workload in WORKLOADS.values())]
QUICK = WORKLOADS["w1"].quick()


def task(peer: str = "hf", index: int = 0, workload: Workload = QUICK) -> Task:
    return Task(workload, list(variants(workload, peer))[index], "model", "cache", workload.requests, 1)


def figures(speed: float, requests: int = 2, batch: int = 0) -> dict[str, Any]:
    return {
        "output_tokens_per_s": speed,
        "prefill_s": 1.0,
        "decode_tokens_per_s": 2 * speed,
        "total_s": 3.0,
        "peak_rss_bytes": 100 * 2**20,
        "requests": requests,
        "batch": batch,
        "threads": 2,
        "versions": {"python": "3.11", "torch": TORCH_VERSION},
    }


def test_prompts_are_the_same_everywhere() -> None:
    assert prompt(0, 3) == [8019, 32748, 17477]
    assert prompt(1, 2) == [15938, 667]
    assert len(prompts(task())) == 2


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: workload.name)
def test_prompts_hold_ordinary_tokens_and_share_no_prefix(workload: Workload) -> None:
    made = [*prompts(task(workload=workload)), warm_up_prompt(task(workload=workload))]
    assert len({ids[0] for ids in made}) == workload.requests + 1
    assert all(100 <= token < 40100 for ids in made for token in ids)


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: workload.name)
def test_workloads_can_be_run(workload: Workload) -> None:
    longest = workload.prompt_tokens + workload.output_tokens
    assert longest <= workload.max_model_len
    assert workload.budget_tokens % BLOCK_TOKENS == 0
    assert workload.budget_tokens < longest, "nothing would be evicted"
    for tokens in workload.pools.values():
        # vLLM refuses a pool that is smaller than one request may be.
        assert tokens % BLOCK_TOKENS == 0
        assert tokens >= workload.max_model_len


@pytest.mark.parametrize("workload", ALL, ids=lambda workload: workload.name)
def test_variants_have_labels_of_their_own(workload: Workload) -> None:
    labels = [variant.label for peer in PEERS for variant in variants(workload, peer)]
    assert len(set(labels)) == len(labels)
    assert {label.partition(":")[0] for label in labels} == set(PEERS)


def test_a_press_for_prompts_is_left_out_where_they_fit_the_budget() -> None:
    assert [v.method for v in variants(WORKLOADS["w4"], "kvpress")] == ["observed attention, decoding too"]


def test_recent_tokens_leave_room() -> None:
    assert recent_tokens(512, 128) == 128
    assert recent_tokens(96, 128) == 32


def test_a_task_survives_its_way() -> None:
    assert Task.from_json(json.loads(json.dumps(task("openvino", 1).to_json()))) == task("openvino", 1)


def test_figures_add_batches_up() -> None:
    found = peer_protocol.figures([Phases(1.0, 3.0, 4, 40), Phases(2.0, 5.0, 4, 60)])
    assert found["output_tokens_per_s"] == 100 / 8
    assert found["prefill_s"] == 3.0
    assert found["decode_tokens_per_s"] == 92 / 5


def test_prefill_lasts_until_the_last_request_has_a_token() -> None:
    watch = peer_protocol.Watch(2)
    watch.counts[0] = 3
    watch.look()
    watch.counts[1] = 1
    watch.look()
    watch.counts = [4, 4]
    watch.look()
    phases = watch.stop(4)
    assert (phases.prefill_output_tokens, phases.output_tokens) == (4, 8)
    assert 0 < phases.prefill_s < phases.total_s


def test_requests_that_were_cut_short_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"\[4, 3\] output tokens instead of 4"):
        peer_protocol.check_counts([4, 3], 4)


HF = list(variants(QUICK, "hf"))
ONE, TWO = (variant.label for variant in HF)


def test_medians_are_of_the_rounds_that_have_a_variant() -> None:
    rounds = [{ONE: figures(10), TWO: figures(1)}, {ONE: figures(30)}, {ONE: figures(20)}]
    found = peer_report.medians(HF, rounds)
    assert found[ONE]["output_tokens_per_s"] == 20
    assert found[ONE]["rounds"] == 3
    assert (found[TWO]["output_tokens_per_s"], found[TWO]["rounds"]) == (1, 1)


def test_a_result_is_complete_once_nothing_is_missing() -> None:
    cut = peer_report.result(QUICK, HF, 2, [{ONE: figures(10), TWO: figures(1)}, {ONE: figures(30)}], {})
    assert not cut["complete"]
    full = peer_report.result(QUICK, HF, 1, [{ONE: figures(10), TWO: figures(1)}], {})
    assert full["complete"]
    assert full["versions"] == {"hf": {"python": "3.11", "torch": TORCH_VERSION}}
    failed = peer_report.result(QUICK, HF, 1, [{ONE: figures(10)}], {TWO: "hf: no memory"})
    assert not failed["complete"]


def test_the_table_says_what_was_run_and_what_failed() -> None:
    rounds = [{ONE: figures(10.04, requests=1, batch=1)}]
    found = peer_report.result(QUICK, HF, 1, rounds, {TWO: "hf: no memory"})
    text = peer_report.table(QUICK, HF, found)
    assert "| hf | full cache | - | 1 | 1 of 2 | 10.0 | 1.0 | 20.1 | 100 |" in text
    assert "| hf | full cache | - | - | - | failed | | | |" in text
    assert "- **failed**: hf: no memory\n" in text
    assert "**not complete**" in text
    assert "Medians of 1 round; 2 threads" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {10}


def test_a_table_can_be_empty() -> None:
    found = peer_report.result(QUICK, HF, 1, [{}], {})
    assert "| hf | full cache | - | - | - | not run |" in peer_report.table(QUICK, HF, found)


def test_batches_that_were_too_much_show() -> None:
    press = list(variants(QUICK, "kvpress"))[:1]
    rounds = [{press[0].label: figures(1, batch=2)}, {press[0].label: figures(1, batch=1)}]
    found = peer_report.result(QUICK, press, 2, rounds, {})
    assert "| observed attention | - | 1, 2 | 2 |" in peer_report.table(QUICK, press, found)


def fake_python(folder: Path, code: str) -> Path:
    """Runs `code` in place of the script that it is called with."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, sys, time\n{code}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_last_line_is_the_figures(tmp_path: Path) -> None:
    code = "task = json.load(sys.stdin)\nprint('noise')\nprint(json.dumps({'threads': task['threads']}))"
    found = peer_process.run(task(), fake_python(tmp_path, code), tmp_path / "log", {}, 60)
    assert found == {"threads": 1}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "raise ImportError('nothing')",
            r"batch 1: .* failed \(1\): ImportError: nothing\. Remove .* made again; its log is log",
        ),
        ("sys.exit('out of ideas')", r"(?s)failed \(1\).*--peers.*out of ideas"),
        ("import os; os.kill(os.getpid(), 9)", "want of memory"),
        ("print('no figures')", r"failed \(0\)"),
        ("time.sleep(60)", "not done after 1 s.*--requests"),
    ],
)
def test_a_failing_peer_is_explained(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(PeerError, match=message):
        peer_process.run(
            task(), fake_python(tmp_path, code), tmp_path / "log", {}, 1 if "sleep" in code else 60
        )


def test_the_project_s_environment_is_not_to_be_removed(tmp_path: Path) -> None:
    python = fake_python(tmp_path, "raise ModuleNotFoundError('vllm')")
    with pytest.raises(PeerError, match="Give --vllm-python a Python that has vLLM"):
        peer_process.run(task("vllm"), python, tmp_path / "log", {}, 60)


def test_a_missing_python_is_explained(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"hf: .*its Python can't be run: .*none"):
        peer_process.run(task(), tmp_path / "none", tmp_path / "log", {}, 60)


def test_what_fails_in_a_batch_is_tried_one_by_one(tmp_path: Path) -> None:
    python = fake_python(
        tmp_path,
        "batch = json.load(sys.stdin)['variant']['batch']\n"
        "sys.exit(1) if batch > 1 else print(json.dumps({'batch': batch}))",
    )
    assert peer_process.run_or_shrink(task("kvpress"), python, tmp_path / "log", {}, 60) == {"batch": 1}
    with pytest.raises(PeerError, match="batch 2"):
        peer_process.run_or_shrink(task("hf", 1), python, tmp_path / "log", {}, 60)


def test_other_peers_run_when_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def python_of(peer: str, vllm_python: Path | None) -> Path:
        if peer == "kvpress":
            raise PeerError("kvpress: pip failed")
        return Path(peer)

    def run_one(task: Task, *more: Any) -> dict[str, Any]:
        written = tmp_path / "w1-quick.json"
        seen.append(written.exists() and json.loads(written.read_text())["complete"])
        if task.variant.evicts:
            raise PeerError(f"{task.variant.label}: broken\nTraceback in {run_peers.ROOT}")
        return figures(1)

    monkeypatch.setattr(run_peers, "ensure_model", lambda: tmp_path)
    monkeypatch.setattr(run_peers, "ensure_python", python_of)
    monkeypatch.setattr(run_peers, "run_or_shrink", run_one)
    options = run_peers.options_of(
        ["--quick", "--peers", "kvpress,openvino,vllm", "--results", str(tmp_path)]
    )
    failed = run_peers.run(QUICK, options)
    # Both of kvpress, and the evicting ones of openvino.
    assert [label.partition(":")[0] for label in failed] == ["kvpress"] * 2 + ["openvino"] * 2
    found = json.loads((tmp_path / "w1-quick.json").read_text())
    assert found["failed"] == failed
    assert failed["openvino: cache eviction, small pool"].endswith("small pool: broken")
    assert set(found["medians"]) == {v.label for p in ("openvino", "vllm") for v in variants(QUICK, p)} - set(
        failed
    )
    assert not any(seen), "a result in the making must not say that it is complete"
    assert "kvpress: pip failed" in (tmp_path / "w1-quick.md").read_text()


def test_a_cut_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_one(task: Task, *more: Any) -> dict[str, Any]:
        if task.variant.pool == "ample":
            raise KeyboardInterrupt
        return figures(1)

    monkeypatch.setattr(run_peers, "ensure_model", lambda: tmp_path)
    monkeypatch.setattr(run_peers, "ensure_python", lambda peer, vllm_python: Path(peer))
    monkeypatch.setattr(run_peers, "run_or_shrink", run_one)
    with pytest.raises(KeyboardInterrupt):
        run_peers.run(QUICK, run_peers.options_of(["--peers", "vllm", "--results", str(tmp_path)]))
    found = json.loads((tmp_path / "w1-quick.json").read_text())
    assert not found["complete"]
    assert list(found["medians"]) == ["vllm: full cache, small pool"]


@pytest.mark.parametrize(
    ("peer", "index", "limit", "expected"),
    [("hf", 0, 3, 3), ("hf", 1, 3, 4), ("hf", 1, 17, 16), ("hf", 0, None, 16), ("vllm", 0, 3, 16)],
)
def test_only_slow_peers_run_fewer_requests(peer: str, index: int, limit: int | None, expected: int) -> None:
    workload = WORKLOADS["w1"]
    variant: Variant = list(variants(workload, peer))[index]
    assert run_peers.requests_of(workload, variant, limit) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "hf,none"], "'hf,none' has others than"),
        (["--rounds", "0"], "'0' is not a number of at least 1"),
        (["--workload", "w9"], "invalid choice: 'w9'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_peers.options_of(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer not in PROJECT_PEERS])
def test_every_requirement_is_pinned_with_a_reason(peer: str) -> None:
    lines = peer_setup.requirements_path(peer).read_text(encoding="utf-8").splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+ +# .+", line) for line in packages)
    assert any(line.startswith(f"torch=={TORCH_VERSION} ") for line in packages)


def test_an_environment_is_made_again_when_its_requirements_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def install(peer: str, python: Path) -> None:
        made.append(python)
        assert not (tmp_path / peer / "left-over").exists()
        if len(made) == 1:
            (tmp_path / peer / "left-over").touch()
            raise PeerError("hf: cut")

    def make(peer: str, command: list[str]) -> None:
        python = Path(command[-1]) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()

    requirements = tmp_path / "requirements.txt"
    requirements.write_text("a==1 # one\n", encoding="utf-8")
    monkeypatch.setattr(peer_setup, "CACHE", tmp_path)
    monkeypatch.setattr(peer_setup, "requirements_path", lambda peer: requirements)
    monkeypatch.setattr(peer_setup, "_install", install)
    monkeypatch.setattr(peer_setup, "_check", make)
    with pytest.raises(PeerError, match="cut"):
        peer_setup.ensure_python("hf")
    for _ in range(2):  # unfinished, so it is made from nothing; then it is there
        assert peer_setup.ensure_python("hf").exists()
    assert len(made) == 2
    requirements.write_text("a==2 # two\n", encoding="utf-8")
    peer_setup.ensure_python("hf")
    assert len(made) == 3


def test_quick_results_stay_out_of_the_repository() -> None:
    assert run_peers.options_of(["--quick"]).results.is_relative_to(peer_setup.CACHE)
    assert run_peers.options_of([]).results == run_peers.RESULTS


def test_labels_name_the_variant() -> None:
    assert replace(HF[0], batch=4).label == "hf: full cache, batch 4"
