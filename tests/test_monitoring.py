"""The files of configs/monitoring: every name in them exists, and the dashboard is in order.

That their queries work is looked at by tests/e2e/test_monitoring.py, which needs Prometheus.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "configs" / "monitoring"
CONFIG, RULES, RULE_TESTS = FOLDER / "prometheus.yaml", FOLDER / "alerts.yaml", FOLDER / "alerts-test.yaml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
DOCUMENT = REPOSITORY / "docs" / "monitoring.md"

VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
GRAFANA_VARIABLES = {"__rate_interval", "__all"}
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
COLUMNS = 24
UNITS = (
    "none",
    "short",
    "percentunit",
    "bytes",
    "s",
    "reqps",
    "suffix:tokens",
    "suffix:tokens/s",
    "suffix:blocks/s",
)

RULE_LIST: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULE_LIST if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in RULE_LIST if "record" in rule}

INFO = "vllm:kv_policy_info"
LABELS = {"model_name", "engine"}
INFO_LABELS = LABELS | {"policy", "budget_tokens", "pinned_tokens", "granularity"}
"""The e2e test compares them with a server's."""
SCRAPE_LABELS = {"job", "instance"}


def dashboard_queries() -> Iterator[tuple[str, dict[str, Any]]]:
    """A name for each query of a panel, and the query."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}: {target['refId']}", target


EXPRESSIONS = {name: target["expr"] for name, target in dashboard_queries()} | {
    rule.get("alert") or rule["record"]: rule["expr"] for rule in RULE_LIST
}


def samples(kind: str, name: str) -> list[str]:
    """What a metric is called in queries."""
    if kind == "histogram":
        return [f"{name}_{part}" for part in ("bucket", "sum", "count")]
    return [f"{name}_total"] if kind == "counter" else [name]


@cache
def own_metrics() -> dict[str, set[str]]:
    """Names in queries, and labels, of what the plugin registers."""
    from vllm_h2o.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, REFUSED

    found = {name: LABELS for counter in COUNTERS for name in samples("counter", PREFIX + counter)}
    found |= {PREFIX + gauge: LABELS for gauge in GAUGES}
    for histogram, _ in HISTOGRAMS.values():
        found |= {name: LABELS | {"le"} for name in samples("histogram", PREFIX + histogram)}
    return found | {INFO: INFO_LABELS, f"{REFUSED}_total": {"model_name"}}


@cache
def vllm_metrics() -> dict[str, set[str]]:
    """The same of what the source of the installed vLLM registers."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text(encoding="utf-8")
    kinds = {f"_{kind}_cls": kind for kind in ("gauge", "counter", "histogram")}
    found: dict[str, set[str]] = {}
    for call in ast.walk(ast.parse(source)):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        name = arguments.get("name")
        if call.func.attr not in kinds or not isinstance(name, ast.Constant):
            continue
        nodes = list(ast.walk(arguments["labelnames"]))
        labels = {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
        if any(isinstance(node, ast.Name) and node.id == "labelnames" for node in nodes):
            labels |= LABELS
        kind = kinds[call.func.attr]
        for sample in samples(kind, str(name.value)):
            found[sample] = labels | ({"le"} if kind == "histogram" else set())
    return found


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(vllm:\w+)", expression))


def test_the_source_of_vllm_is_understood() -> None:
    assert {"vllm:num_preemptions_total", "vllm:inter_token_latency_seconds_bucket"} <= set(vllm_metrics())
    assert vllm_metrics()["vllm:request_success_total"] == LABELS | {"finished_reason"}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_metrics_exist(name: str) -> None:
    known = own_metrics() | vllm_metrics()
    used = names(EXPRESSIONS[name]) | set(re.findall(r"\b(kv_policy:[\w:]+)", EXPRESSIONS[name]))
    if "up{" not in EXPRESSIONS[name]:
        assert used
    assert used <= set(known) | set(RECORDS)


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_labels_exist(name: str) -> None:
    """A misspelt label is no error in Prometheus: it matches nothing, or sums over everything."""
    known = own_metrics() | vllm_metrics()
    expression = EXPRESSIONS[name]
    for metric, selector in re.findall(r"\b(vllm:\w+)\{(.*?)\}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= known[metric] | SCRAPE_LABELS
    allowed = SCRAPE_LABELS.union(*(known[metric] for metric in names(expression)))
    if RECORDS.keys() & set(re.findall(r"\b(kv_policy:[\w:]+)", expression)):
        allowed |= LABELS
    for listed in re.findall(r"\b(?:by|on) \((.*?)\)", expression):
        assert set(listed.split(", ")) <= allowed


def test_every_metric_of_ours_is_on_the_dashboard() -> None:
    shown = set().union(*(names(target["expr"]) for _, target in dashboard_queries()))
    for name in own_metrics():
        assert name in shown, f"{name} is on no panel"


def test_every_record_is_for_an_alert() -> None:
    for record in RECORDS:
        assert any(record in rule["expr"] for rule in ALERTS.values()), record


def test_variables_are_defined_and_used() -> None:
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used == VARIABLES.keys() | GRAFANA_VARIABLES
    assert VARIABLES["datasource"]["query"] == "prometheus"
    for name in ("model_name", "engine", "instance"):
        (metric, label) = re.fullmatch(
            r"label_values\((\S+?)(?:\{.*\})?, (\w+)\)", VARIABLES[name]["definition"]
        ).groups()  # type: ignore[union-attr]
        assert (metric, label) == (INFO, name)
        assert VARIABLES[name]["query"]["query"] == VARIABLES[name]["definition"]


@pytest.mark.parametrize("name", [name for name, _ in dashboard_queries()])
def test_queries_follow_the_variables(name: str) -> None:
    """Every metric is selected by all variables that it has a label for."""
    for metric in re.findall(r"\bvllm:\w+(?:\{.*?\})?", EXPRESSIONS[name]):
        selectors = [f'{label}=~"${label}"' for label in ("model_name", "instance", "engine")]
        if "refused" in metric:
            selectors.remove('engine=~"$engine"')  # nothing of an engine yet
        assert metric.endswith(f"{{{', '.join(selectors)}}}")


def test_ids_are_unique() -> None:
    found = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(found) == len(set(found))
    titles = [panel["title"] for panel in DASHBOARD["panels"]]
    assert len(titles) == len(set(titles))


def test_panels_do_not_overlap() -> None:
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["w"] > 0
        assert place["h"] > 0
        assert 0 <= place["x"] <= COLUMNS - place["w"]
    for one, other in combinations((panel["gridPos"] for panel in DASHBOARD["panels"]), 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@pytest.mark.parametrize("panel", PANELS, ids=[panel["title"] for panel in PANELS])
def test_panels_are_complete(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    references = [target["refId"] for target in panel["targets"]]
    assert references
    assert len(references) == len(set(references))
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["instant"] is not target["range"]
        assert target["instant"] is (panel["type"] in ("stat", "table"))


def test_it_can_be_imported() -> None:
    """Grafana gives it an id, and takes a second import of its uid for a new version."""
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"]
    assert len(DASHBOARD["uid"]) <= 40
    assert isinstance(DASHBOARD["schemaVersion"], int)


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_say_what_to_do(name: str) -> None:
    alert = ALERTS[name]
    assert re.fullmatch(r"[1-9]\d*m", alert["for"])
    assert alert["labels"]["severity"] in ("critical", "warning", "info")
    assert set(alert["annotations"]) == {"summary", "description"}
    assert alert["annotations"]["description"].endswith(".")


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_have_cases_of_both_kinds(name: str) -> None:
    tests = yaml.safe_load(RULE_TESTS.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test.get("alert_rule_test", []) if case["alertname"] == name]
    assert {bool(case["exp_alerts"]) for case in cases} == {True, False}


def test_alerts_watch_the_job_of_the_example() -> None:
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    watched = set(re.findall(r'job="(.*?)"', " ".join(EXPRESSIONS.values())))
    assert watched == jobs
    assert config["rule_files"] == [RULES.name]


@pytest.mark.parametrize("name", [*ALERTS, *(panel["title"] for panel in PANELS)])
def test_the_document_explains_it(name: str) -> None:
    assert f"| {name} |" in DOCUMENT.read_text(encoding="utf-8").replace("`", "")
