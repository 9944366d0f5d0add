"""Two engines behind two API servers: every figure adds up, and the endpoint shows it to those with a key."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.servers import MODEL_NAME, Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KEY = "a-key-for-this-test"
BUDGET, BLOCKS, BLOCK = 256, 60, 32
SECRET_TOKENS = list(range(1000, 1400))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET,
        "--num-gpu-blocks-override": BLOCKS,
        "--max-model-len": 2048,
        "--max-num-batched-tokens": 512,
        "--api-server-count": 2,
        "--data-parallel-size": 2,
        "--api-key": KEY,
    }
    arguments = [str(word) for option in options.items() for word in option]
    log_path = tmp_path_factory.mktemp("pair") / "server.log"
    environment = {"VLLM_PLUGINS": "h2o,kv_policy", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with Server(log_path, *arguments, "--enforce-eager", api_key=KEY, **environment) as running:
        yield running


def get(server: Server, path: str, key: str | None = KEY, body: Any = None) -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, data, headers), timeout=180
    ) as answer:
        text = answer.read().decode()
    return text if "html" in answer.headers["Content-Type"] else json.loads(text)


def ask(server: Server, max_tokens: int = 60, **xargs: Any) -> Any:
    body = {"model": MODEL_NAME, "prompt": SECRET_TOKENS, "max_tokens": max_tokens, "ignore_eos": True}
    answer = get(server, "/v1/completions", body={**body, "vllm_xargs": {"kv_report": 1, **xargs}})
    return answer["kv_transfer_params"]["kv_policy"]


def test_counters_of_all_processes_add_up(pair: Server) -> None:
    before = get(pair, "/kv_policy/stats")
    assert before["evicted_tokens_total"] == 0
    with ThreadPoolExecutor(6) as pool:
        reports = list(pool.map(lambda _: ask(pair), range(6)))
    assert {report["evicted_tokens"] for report in reports} == {224}
    pair.wait_idle()
    metrics = pair.metrics()
    of_engines = [
        value
        for name, value in metrics.samples.items()
        if name.startswith("vllm:kv_policy_evicted_tokens_total{")
    ]
    assert len(of_engines) == 2
    assert all(value > 0 for value in of_engines), "both engines had requests"
    assert sum(of_engines) == 6 * 224
    assert metrics.total("vllm:kv_policy_requests_evicted_total") == 6
    assert metrics.total("vllm:kv_policy_live_tokens") == 0


def test_what_is_in_force(pair: Server) -> None:
    about = get(pair, "/kv_policy")
    assert about["active"] is about["evicts"] is True
    assert about["policy"]["budget_tokens"] == BUDGET
    assert about["request_limits"] == {
        "fields": ["kv_budget", "kv_pin_tokens", "kv_policy", "kv_report"],
        "kv_budget": [96, BUDGET],
        "kv_pin_tokens": [32, 192],
    }
    assert set(about["versions"]) == {"vllm-h2o", "vllm", "torch"}


@pytest.mark.parametrize("path", ["/kv_policy", "/kv_policy/stats"])
@pytest.mark.parametrize("key", [None, "wrong", ""])
def test_data_is_behind_the_key(pair: Server, path: str, key: str | None) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(pair, path, key)
    assert error.value.code == 401


def test_what_fits_one_engine_counts(pair: Server) -> None:
    """Not what all of them hold together: a request lives in one."""
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(pair, kv_policy="none", max_tokens=(BLOCKS - 1) * BLOCK - len(SECRET_TOKENS) + 1)
    assert error.value.code == 400
    assert f"the KV cache holds {(BLOCKS - 1) * BLOCK}" in json.load(error.value)["error"]["message"]


def test_the_page_holds_no_data(pair: Server) -> None:
    assert get(pair, "/kv_policy/view", key=None) == get(pair, "/kv_policy/view")
    assert MODEL_NAME not in get(pair, "/kv_policy/view")


def test_running_requests_are_shown_by_their_lengths_only(pair: Server) -> None:
    """Those of the first engine, which gets some of the four."""
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, pair, 400, kv_budget=128) for _ in range(4)]
        seen = []
        while not all(answer.done() for answer in answers):
            seen.append(get(pair, "/kv_policy/stats"))
            time.sleep(0.3)
        for answer in answers:
            assert answer.result()["budget_tokens"] == 128
    shown = [request for stats in seen for request in stats["requests"]]
    assert any(request["evicted_tokens"] > 0 for request in shown)
    for request in shown:
        assert set(request) == {"live_tokens", "evicted_tokens"}
        assert 0 <= request["live_tokens"] <= len(SECRET_TOKENS) + 128
    for stats in seen:
        assert all(isinstance(value, int | float) for name, value in stats.items() if name != "requests")
