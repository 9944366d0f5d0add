"""The rules and the dashboard of configs/monitoring, in a real Prometheus that watches a real server."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import pytest
import yaml

import server_process
from tests.e2e.servers import MODEL_NAME, Server
from tests.test_monitoring import (
    ALERTS,
    CONFIG,
    EXPRESSIONS,
    INFO,
    INFO_LABELS,
    RECORDS,
    RULE_TESTS,
    RULES,
    SCRAPE_LABELS,
    VARIABLES,
    dashboard_queries,
    names,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed"
)

BUDGET, BLOCK, BLOCKS, MAX_MODEL_LEN = 256, 32, 96, 4096
PROMPT, ANSWER = 400, 400
LENGTH = PROMPT + ANSWER
SCRAPE_SECONDS = 1
# What Grafana makes of $__rate_interval: four scrapes.
RATE_INTERVAL = f"{4 * SCRAPE_SECONDS}s"
_READY_SECONDS = 30.0
_SCRAPED_SECONDS = 30.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2

QUERIES = dict(dashboard_queries())


class Prometheus:
    """A Prometheus of its own on loopback, with the shipped config and rules; a context manager that ends it.

    Args:
        targets: ``host:port`` of what the job of the shipped config scrapes.
    """

    def __init__(self, folder: Path, targets: list[str], port: int | None = None) -> None:
        port = port or server_process.free_port()
        self.url = f"http://{server_process.HOST}:{port}"
        self._log_path = folder / "prometheus.log"
        self._num_targets = len(targets)
        config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
        config["global"] = {
            "scrape_interval": f"{SCRAPE_SECONDS}s",
            "evaluation_interval": f"{SCRAPE_SECONDS}s",
        }
        config["rule_files"] = [str(RULES)]
        config["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={server_process.HOST}:{port}",
        ]

    def __enter__(self) -> Prometheus:
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        try:
            self.wait_until(self._is_ready, _READY_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get(self, path: str, **parameters: Any) -> Any:
        """Data of one call of its HTTP API; fails with the reason that Prometheus gives."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                body = json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{url}: {error.read().decode()}")
        assert body["status"] == "success"
        assert not body.get("warnings")
        return body["data"]

    def now(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Series with one value each."""
        result: list[dict[str, Any]] = self.get("query", query=expression, time=at or time.time())["result"]
        return result

    def between(self, expression: str, start: float, end: float) -> list[float]:
        """Values of all series, without those that aren't finite."""
        data = self.get("query_range", query=expression, start=start, end=end, step=SCRAPE_SECONDS)
        values = (float(value) for series in data["result"] for _, value in series["values"])
        return [value for value in values if math.isfinite(value)]

    def active_alerts(self) -> set[str]:
        """Names of those that fire, or will if what they watch stays like this."""
        return {alert["labels"]["alertname"] for alert in self.get("alerts")["alerts"]}

    def wait_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            log = self._log_path.read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, f"prometheus ended: {log}"
            assert time.monotonic() < deadline, f"not within {timeout_seconds:.0f} s: {log}"
            time.sleep(_POLL_SECONDS)

    def wait_for_scrapes(self) -> None:
        """Wait until every target was scraped after this call, and then every rule was evaluated."""
        called = time.time()
        self.wait_until(lambda: self._scraped_since(called), _SCRAPED_SECONDS)
        scraped = time.time()
        self.wait_until(lambda: self._evaluated_since(scraped), _SCRAPED_SECONDS)

    def _scraped_since(self, moment: float) -> bool:
        scrapes = [float(series["value"][1]) for series in self.now("timestamp(up)")]
        return len(scrapes) == self._num_targets and min(scrapes) > moment

    def _evaluated_since(self, moment: float) -> bool:
        rules = [rule for group in self.get("rules")["groups"] for rule in group["rules"]]
        return min(_unix(rule["lastEvaluation"]) for rule in rules) > moment

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


def _unix(timestamp: str) -> float:
    """Seconds of an RFC 3339 time, which has more digits than Python reads."""
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*", r"\1", timestamp)).timestamp()


@dataclass(frozen=True)
class Watched:
    """A server, its Prometheus, and when requests ran that give no reason for an alert."""

    server: Server
    prometheus: Prometheus
    start: float
    end: float

    @property
    def target(self) -> str:
        return self.server.url.removeprefix("http://")

    def fill(self, expression: str) -> str:
        """Variables as Grafana fills them in: values for regular expressions, inside a string of PromQL."""
        values = {"model_name": MODEL_NAME, "instance": self.target, "engine": "0"}
        expression = expression.replace("$__rate_interval", RATE_INTERVAL)
        for name, value in values.items():
            escaped = re.escape(value).replace("\\", "\\\\")
            expression = expression.replace(f"${name}", f"({escaped})")
        assert "$" not in expression
        return expression


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Four requests of up to ``LENGTH`` tokens, in a pool that holds all of their budgets."""
    options = {
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET,
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": BLOCKS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": 512,
    }
    arguments = [str(word) for option in options.items() for word in option]
    folder = tmp_path_factory.mktemp("monitoring")
    server = Server(folder / "server.log", *arguments, "--enforce-eager", VLLM_CPU_KVCACHE_SPACE="1")
    with server, Prometheus(folder, [server.url.removeprefix("http://")]) as prometheus:
        prometheus.wait_for_scrapes()
        start = time.time()
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(ask, server, first, PROMPT, ANSWER) for first in range(4)]:
                done.result()
        server.wait_idle()
        prometheus.wait_for_scrapes()
        yield Watched(server, prometheus, start, time.time())


def ask(server: Server, first: int, prompt_tokens: int, max_tokens: int, **xargs: Any) -> None:
    server.client.completions.create(
        model=MODEL_NAME,
        prompt=list(range(1000 + first, 1000 + first + prompt_tokens)),
        max_tokens=max_tokens,
        extra_body={"ignore_eos": True, "vllm_xargs": xargs},
    )


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )


@needs_promtool
def test_promtool_accepts_the_files() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALERTS) + len(RECORDS)} rules found" in checked.stdout
    # The config check reads the rules, too: their path is relative to it.
    checked = promtool("check", "config", CONFIG)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert RULES.name in checked.stdout


@needs_promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = promtool("test", "rules", RULE_TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
@pytest.mark.parametrize("duration", ["0m", "1000m"])
def test_the_cases_notice_alerts_that_come_at_once_or_never(tmp_path: Path, duration: str) -> None:
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                rule["for"] = duration
    (tmp_path / RULES.name).write_text(yaml.safe_dump(rules), encoding="utf-8")
    shutil.copy(RULE_TESTS, tmp_path)
    tested = promtool("test", "rules", tmp_path / RULE_TESTS.name)
    assert tested.returncode == 1
    for name in ALERTS:
        assert f"alertname: {name}," in tested.stdout + tested.stderr


@needs_prometheus
@pytest.mark.parametrize("name", QUERIES)
def test_panels_show_something(watched: Watched, name: str) -> None:
    expression = watched.fill(QUERIES[name]["expr"])
    values = watched.prometheus.between(expression, watched.start, watched.end)
    assert values, expression
    if QUERIES[name]["instant"]:
        middle = (watched.start + watched.end) / 2
        assert watched.prometheus.now(expression, middle)


@needs_prometheus
@pytest.mark.parametrize("name", [*ALERTS, *RECORDS])
def test_rules_are_evaluated(watched: Watched, name: str) -> None:
    watched.prometheus.now(EXPRESSIONS[name])
    groups = watched.prometheus.get("rules")["groups"]
    (rule,) = (rule for group in groups for rule in group["rules"] if rule["name"] == name)
    assert rule["health"] == "ok", rule
    if name in RECORDS:
        assert watched.prometheus.between(name, watched.start, watched.end)


@needs_prometheus
def test_variables_offer_what_there_is(watched: Watched) -> None:
    expected = {"model_name": [MODEL_NAME], "instance": [watched.target], "engine": ["0"]}
    for name, values in expected.items():
        series = re.fullmatch(r"label_values\((.*), \w+\)", VARIABLES[name]["definition"])
        assert series is not None
        found = watched.prometheus.get(f"label/{name}/values", **{"match[]": watched.fill(series[1])})
        assert found == values


@needs_prometheus
def test_labels_of_the_policy(watched: Watched) -> None:
    (series,) = watched.prometheus.now(INFO)
    assert set(series["metric"]) == INFO_LABELS | SCRAPE_LABELS | {"__name__"}
    assert series["metric"]["policy"] == "h2o"
    assert series["metric"]["budget_tokens"] == str(BUDGET)


@needs_prometheus
def test_the_saving_is_seen(watched: Watched) -> None:
    """Of ``LENGTH`` tokens at their end, requests hold at least a block less than the budget."""

    def values(name: str) -> list[float]:
        expression = watched.fill(QUERIES[name]["expr"])
        return watched.prometheus.between(expression, watched.start, watched.end)

    for name in ("Saving: A", "Saving by engine: A"):
        assert 0.5 < max(values(name)) <= 1 - (BUDGET - BLOCK) / LENGTH
    assert max(values("Evicted tokens: A")) > 0
    assert max(values("Blocks given back: A")) > 0
    assert max(values("Requests: A")) == 4
    assert max(values("Share of tokens evicted: A")) > 0.4


@needs_prometheus
def test_no_alert_in_normal_operation(watched: Watched) -> None:
    """Not even one that waits for its time to be over."""
    seen = watched.prometheus.between("ALERTS", watched.start, watched.end)
    assert not seen, watched.prometheus.now(f"last_over_time(ALERTS[{watched.end - watched.start:.0f}s])")


@needs_prometheus
def test_prometheus_has_the_numbers_of_the_server(watched: Watched) -> None:
    watched.server.wait_idle()
    watched.prometheus.wait_for_scrapes()
    used = set().union(*(names(expression) for expression in EXPRESSIONS.values()))
    stored = {}
    for series in watched.prometheus.now('{__name__=~"vllm:.*"}'):
        labels = {name: value for name, value in series["metric"].items() if name not in SCRAPE_LABELS}
        stored[labels.pop("__name__"), frozenset(labels.items())] = float(series["value"][1])
    compared = set()
    for key, value in watched.server.metrics().counters().items():
        name, _, selector = key.partition("{")
        if name in used:
            assert stored[name, frozenset(re.findall(r'(\w+)="(.*?)"', selector))] == value, key
            compared.add(name)
    assert compared == {name for name in used if re.search(r"_(total|sum|count|bucket)$", name)}
    of_engine = frozenset({"model_name": MODEL_NAME, "engine": "0"}.items())
    assert stored["vllm:kv_policy_evicted_tokens_total", of_engine] > 0


@needs_prometheus
def test_alerts_of_a_load_that_goes_wrong(watched: Watched) -> None:
    """Budgets that forget nearly everything, and clients that are refused: these two alerts and no other."""
    for number in range(12):
        with pytest.raises(openai.BadRequestError):
            ask(watched.server, number, 4, 1, kv_budget=BUDGET + 1)
    for number in range(2):
        ask(watched.server, number, 4000, 8, kv_budget=96)
    watched.server.wait_idle()
    watched.prometheus.wait_for_scrapes()
    assert watched.prometheus.active_alerts() == {"KVPolicyRefusedRequests", "KVPolicyForgetsMost"}


@needs_prometheus
def test_servers_that_are_down_or_have_no_policy(tmp_path: Path) -> None:
    """Prometheus itself is something that has metrics but no policy."""
    port, nobody = server_process.free_port(), server_process.free_port()
    targets = [f"{server_process.HOST}:{port}", f"{server_process.HOST}:{nobody}"]
    with Prometheus(tmp_path, targets, port) as prometheus:
        prometheus.wait_for_scrapes()
        active = {
            (alert["labels"]["alertname"], alert["labels"].get("instance"))
            for alert in prometheus.get("alerts")["alerts"]
        }
    assert active == {("KVPolicyMissing", targets[0]), ("KVPolicyServerDown", targets[1])}


@needs_prometheus
def test_no_targets(tmp_path: Path) -> None:
    with Prometheus(tmp_path, []) as prometheus:
        prometheus.wait_until(lambda: prometheus.active_alerts() == {"KVPolicyNoTargets"}, _SCRAPED_SECONDS)
