"""The load test's own parts: workload files, command lines, medians and ratios, floors, metrics.

That servers run under load is shown by `scripts/load_test.py --quick`, which `.ci/run` runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import load_dataset
import load_report
import load_run
import load_test
import load_workload
import machine
import server_metrics
from load_results import ResultError, Results
from load_test import CONFIGS
from load_workload import WorkloadError, arguments

TEXT = """
description: two servers
server: {max-model-len: 1024}
variants:
  plain: {}
  h2o: {kv-policy: h2o, block-size: 16}
loads:
  short: {num-prompts: 2, random-input-len: 8}
compare:
  - {name: h2o / plain, of: h2o, to: plain}
floors:
  short: {h2o / plain: 0.9}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.yaml")))
def test_every_workload_can_be_read(name: str) -> None:
    workload = load_workload.read(CONFIGS / f"{name}.yaml")
    assert workload.name == name
    for flags in workload.variants.values():
        assert ("kv-budget" in flags) == (flags.get("kv-policy") == "h2o")


def test_variants_and_loads_inherit(path: Path) -> None:
    workload = load_workload.read(path)
    assert workload.variants["plain"]["max-model-len"] == 1024
    assert workload.variants["plain"]["block-size"] == 32
    assert workload.variants["h2o"]["block-size"] == 16
    assert workload.loads["short"]["ignore-eos"] is True


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("description", "discription", "must have the keys"),
        ("of: h2o", "of: h20", "compares 'h20', which is none of"),
        ("short: {h2o", "shirt: {h2o", "sets floors for 'shirt'"),
        ("h2o / plain: 0.9", "plain / h2o: 0.9", "which it doesn't compare"),
        ("variants:", "variants: [", "can't be read"),
    ],
)
def test_mistakes_are_named(path: Path, old: str, new: str, message: str) -> None:
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(WorkloadError, match=message):
        load_workload.read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"none\.yaml can't be read"):
        load_workload.read(tmp_path / "none.yaml")


def test_flags_become_a_command_line() -> None:
    flags = {"a": True, "b": False, "c": None, "d": 0, "e": "x"}
    assert arguments(flags) == ["--a", "--d", "0", "--e", "x"]


def figures(throughput: float, tpot: float = 10.0) -> dict[str, Any]:
    return {
        "short": {
            "output_throughput": throughput,
            "median_ttft_ms": 100.0,
            "median_tpot_ms": tpot,
            "p99_itl_ms": 20.0,
            "peak_running": 2.0,
            "peak_kv_usage": 0.5,
            "preemptions": 0.0,
        }
    }


ROUNDS = [
    {"plain": figures(100), "h2o": figures(150, 5)},
    {"plain": figures(50), "h2o": figures(60)},
    {"plain": figures(80), "h2o": figures(160)},
]


def test_ratios_are_of_runs_next_to_each_other(path: Path) -> None:
    found = load_report.summary(load_workload.read(path), ROUNDS)
    assert found["medians"]["plain"]["short"]["output_throughput"] == 80
    ratio = found["ratios"]["short"]["h2o / plain"]
    # Not 150 / 80, the ratio of the medians.
    assert ratio["output_throughput"] == 1.5
    assert ratio["output_throughput_of_rounds"] == [1.5, 1.2, 2.0]
    assert ratio["median_tpot_ms_of_rounds"] == [0.5, 1.0, 1.0]


def test_a_round_that_was_cut_counts_for_what_it_has(path: Path) -> None:
    found = load_report.summary(load_workload.read(path), [*ROUNDS, {"plain": figures(10)}])
    assert found["medians"]["plain"]["short"]["output_throughput"] == 65
    assert len(found["ratios"]["short"]["h2o / plain"]["output_throughput_of_rounds"]) == 3


def test_nothing_to_compare_yet(path: Path) -> None:
    workload = load_workload.read(path)
    found = load_report.summary(workload, [{"plain": figures(100)}])
    assert found["ratios"] == {}
    assert list(load_report.too_slow(workload, found)) == ["short, h2o / plain: not measured, floor 0.9"]


def test_floors(path: Path) -> None:
    workload = load_workload.read(path)
    fast = load_report.summary(workload, ROUNDS)
    assert list(load_report.too_slow(workload, fast)) == []
    slow = load_report.summary(workload, [{"plain": figures(100), "h2o": figures(85)}])
    assert list(load_report.too_slow(workload, slow)) == [
        "short, h2o / plain: 0.85 is under the floor of 0.9"
    ]


@pytest.mark.parametrize(
    ("h2o_of_rounds", "rounds", "slow"),
    [
        pytest.param([95], 1, [], id="fast at once"),
        pytest.param([80, 95, 96], 3, [], id="slow once"),
        pytest.param(
            [80, 81, 96], 3, ["short, h2o / plain: 0.81 is under the floor of 0.9"], id="slow twice"
        ),
    ],
)
def test_the_median_of_three_rounds_decides_where_one_was_slow(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    h2o_of_rounds: list[float],
    rounds: int,
    slow: list[str],
) -> None:
    left = iter(h2o_of_rounds)
    # Figures instead of servers, which `--quick` starts.
    monkeypatch.setattr(
        load_run, "run_variant", lambda _, variant, *rest: figures(100 if variant == "plain" else next(left))
    )
    options = argparse.Namespace(results=tmp_path / "found", rounds=1, add=False)
    assert load_test.run(path, options) == slow
    content = json.loads((tmp_path / "found" / "two.json").read_text(encoding="utf-8"))
    assert len(content["rounds"]) == rounds
    assert content["complete"] is True


def test_table_says_medians_and_ratios(path: Path) -> None:
    workload = load_workload.read(path)
    text = load_report.table(workload, load_report.summary(workload, ROUNDS))
    assert "| short | plain | 80.0 | 100 | 10.0 | 20 | 2 | 0 | 50% |" in text
    assert "- short, h2o / plain: output tok/s **1.50** (1.50, 1.20, 2.00); TTFT 1.00; TPOT 1.00" in text


METRICS = """
# HELP vllm:num_requests_running Number of requests.
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 3.0
vllm:num_requests_running_more{engine="1"} 9.0
plain_gauge 1e-05
"""


def test_metrics_are_summed_over_their_labels() -> None:
    names = ["vllm:num_requests_running", "plain_gauge"]
    assert server_metrics.parse(METRICS, names) == {names[0]: 5.0, names[1]: 1e-05}


def test_a_missing_metric_is_named() -> None:
    with pytest.raises(ValueError, match="no vllm:gone"):
        server_metrics.parse(METRICS, ["vllm:gone"])


@pytest.fixture
def results(path: Path, tmp_path: Path) -> Results:
    return Results(load_workload.read(path), tmp_path / "found", rounds_wanted=2)


def measure(results: Results, *variants: str) -> None:
    results.start_round()
    for variant in variants:
        results.add(variant, figures(100))


def test_what_was_measured_is_kept_and_marked_as_partial(results: Results, tmp_path: Path) -> None:
    measure(results, "plain")
    content = json.loads((tmp_path / "found" / "two.json").read_text(encoding="utf-8"))
    assert content["complete"] is False
    assert list(content["rounds"][0]["servers"]) == ["plain"]
    assert content["rounds"][0]["versions"]["vllm-h2o"]
    assert "partial: 0 of 2 rounds" in (tmp_path / "found" / "two.md").read_text(encoding="utf-8")


def test_rounds_are_added_to_a_run_that_was_cut(path: Path, results: Results, tmp_path: Path) -> None:
    measure(results, "plain", "h2o")
    measure(results, "plain")
    again = Results(load_workload.read(path), tmp_path / "found", rounds_wanted=2)
    again.load()
    assert again.missing_rounds() == 1
    measure(again, "plain", "h2o")
    assert again.missing_rounds() == 0
    content = json.loads((tmp_path / "found" / "two.json").read_text(encoding="utf-8"))
    assert content["complete"] is True
    assert [len(r["servers"]) for r in content["rounds"]] == [2, 1, 2]
    assert len(content["ratios"]["short"]["h2o / plain"]["output_throughput_of_rounds"]) == 2


def test_nothing_is_added_to_another_workload(path: Path, results: Results, tmp_path: Path) -> None:
    measure(results, "plain", "h2o")
    path.write_text(TEXT.replace("1024", "2048"), encoding="utf-8")
    with pytest.raises(ResultError, match="measured with other servers or loads"):
        Results(load_workload.read(path), tmp_path / "found", rounds_wanted=2).load()


def test_nothing_is_added_to_what_another_machine_measured(
    path: Path, results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(machine, "describe", lambda: "another")
        measure(results, "plain", "h2o")
    with pytest.raises(ResultError, match=r"on another machine \(another\)"):
        Results(load_workload.read(path), tmp_path / "found", rounds_wanted=2).load()


def test_nothing_is_added_to_what_is_no_result(results: Results, tmp_path: Path) -> None:
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "two.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ResultError, match="no result of a load test"):
        results.load()


@pytest.mark.parametrize("path", sorted(load_test.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_are_of_the_workloads_as_they_are(path: Path) -> None:
    workload = load_workload.read(CONFIGS / f"{path.stem}.yaml")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["workload"] == {"servers": workload.variants, "loads": workload.loads}
    assert content["rounds"]


def test_conversations_are_always_the_same(tmp_path: Path) -> None:
    first = load_dataset.write(tmp_path / "a" / "conversations.json").read_text(encoding="utf-8")
    assert load_dataset.write(tmp_path / "b.json").read_text(encoding="utf-8") == first
    prompts = [entry["conversations"][0]["value"] for entry in json.loads(first)]
    assert len({prompt.split()[0] for prompt in prompts}) == load_dataset.NUM_CONVERSATIONS
    lengths = sorted(len(prompt.split()) for prompt in prompts)
    assert 40 < lengths[len(lengths) // 2] < 80
    assert lengths[0] < 15
    assert lengths[-1] > 300
