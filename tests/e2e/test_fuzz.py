"""Odd requests to a real server: none is an error of the server's, costs much, or leaves anything behind.

Only what is ours varies, beside a few harmless values of vLLM's own fields, so that what goes wrong is ours.
Texts have no lone surrogates: to those in any argument or name vLLM itself answers 500.
"""

from __future__ import annotations

import copy
import http.client
import json
import re
import string
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error

from tests.e2e.servers import MODEL_NAME, Server
from vllm_h2o.request_limits import FIELDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

BLOCK, BLOCKS, BUDGET, MAX_MODEL_LEN = 32, 40, 128, 2048
LEAST_BUDGET, MOST_PINNED = 96, 64
POOL_TOKENS = (BLOCKS - 1) * BLOCK

REQUEST_SECONDS = 120
ENDPOINT = ("/kv_policy", "/kv_policy/stats", "/kv_policy/view")
LONGEST_REFUSAL = 1000
"""Characters of an answer that says what is wrong, however long that was."""

fuzz = settings(max_examples=60, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def message(self) -> str:
        """What a refusal says."""
        said: str = json.loads(self.text)["error"]["message"]
        return said

    @property
    def events(self) -> list[dict[str, Any]]:
        """Of a stream."""
        lines = [line.removeprefix("data: ") for line in self.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def send(server: Server, path: str, body: Any = None) -> Answer:
    """POST with a body, else GET. NaN and infinity are sent as Python's JSON knows them."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            return Answer(response.status, response.read().decode())
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode())


def complete(server: Server, xargs: Any = None, **fields: Any) -> Answer:
    body = {"model": MODEL_NAME, "prompt": [7] * 8, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    return send(server, "/v1/completions", {**body, **fields, "vllm_xargs": xargs})


def reference(server: Server) -> list[int]:
    """A greedy answer that tokens were dropped for."""
    prompt = [1000 + 7 * i for i in range(BUDGET + 72)]
    answer = complete(server, prompt=prompt, max_tokens=12, return_token_ids=True)
    tokens: list[int] = json.loads(answer.text)["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its pool is smaller than its longest sequence. float32, because answers are compared."""
    options = {
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET,
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": BLOCKS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": 256,
        "--max-num-seqs": 8,
        "--dtype": "float32",
    }
    arguments = [str(word) for option in options.items() for word in option]
    log_path = tmp_path_factory.mktemp("fuzz") / "server.log"
    environment = {"VLLM_PLUGINS": "h2o,kv_policy", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with Server(log_path, *arguments, "--enforce-eager", **environment) as running:
        yield running


@pytest.fixture(scope="module")
def before(served: Server) -> list[int]:
    """The reference answer of a server that has seen nothing else."""
    return reference(served)


@pytest.fixture(autouse=True)
def _unharmed(served: Server, before: list[int]) -> Iterator[None]:
    """Afterwards every block is free, and the server answers as it did at first."""
    yield
    served.wait_idle()
    assert reference(served) == before


# --- any values ----------------------------------------------------------------------------------

TEXT = st.text(max_size=30)
NUMBERS = st.one_of(
    st.integers(-2, 2 * BUDGET),
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**300, 1e308, -0.0, 127.5, 128.0]),
)
NUMBERS_AS_TEXT = st.sampled_from(
    ["nan", "inf", "-Infinity", "1e400", "1e2", "0x80", "1_2_8", " 128 ", "\u0661\u0662\u0668", "9" * 5000]
)
VALUES = st.one_of(
    NUMBERS,
    NUMBERS.map(str),
    NUMBERS_AS_TEXT,
    TEXT,
    st.sampled_from(["none", "None", "h2o", "x" * 3000, "/a" * 50, "%s%n{0}", "\x00", "\u2028"]),
    st.none(),
    st.booleans(),
    st.lists(st.one_of(NUMBERS, TEXT), max_size=3),
    st.dictionaries(TEXT, NUMBERS, max_size=2),
)
ALLOWED = st.fixed_dictionaries(
    {},
    optional={
        "kv_budget": st.integers(LEAST_BUDGET, BUDGET),
        "kv_pin_tokens": st.integers(BLOCK, MOST_PINNED),
        "kv_report": st.sampled_from([0, 1]),
    },
)
NAMES = st.one_of(
    st.sampled_from(FIELDS),
    st.sampled_from(FIELDS).flatmap(
        lambda name: st.integers(0, len(name)).map(lambda at: name[:at] + name[at + 1 :])
    ),
    st.sampled_from(
        ["KV_BUDGET", "kv-budget", "kv_", "kv_budget ", "budget", "kv_budget\x00", "", "x" * 500]
    ),
    TEXT,
)
CLOSE = st.fixed_dictionaries(
    {},
    optional={
        "kv_budget": st.integers(LEAST_BUDGET - BLOCK - 1, BUDGET + 2 * BLOCK),
        "kv_pin_tokens": st.integers(0, MOST_PINNED + BLOCK + 1),
    },
)
"""Around what is allowed."""

XARGS = st.one_of(
    CLOSE,
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.builds(lambda right, odd: {**right, **odd}, ALLOWED, st.dictionaries(NAMES, VALUES, max_size=1)),
    ALLOWED,
    st.sampled_from([{"kv_policy": "none"}, None, [], "kv_budget", 1]),
)


def assert_bounded(report: dict[str, int], xargs: dict[str, Any], num_tokens: int) -> None:
    """A request holds no more than the server allows it, or said that it keeps everything."""
    assert report["live_tokens"] + report["evicted_tokens"] == num_tokens
    if xargs.get("kv_policy") == "none":
        assert report["evicted_tokens"] == 0
    else:
        assert LEAST_BUDGET <= report["budget_tokens"] <= BUDGET
        assert report["live_tokens"] < report["budget_tokens"]


def test_any_arguments_are_served_within_bounds_or_refused(served: Server) -> None:
    statuses: list[int] = []

    @fuzz
    @given(xargs=XARGS, stream=st.booleans())
    def check(xargs: Any, stream: bool) -> None:
        if isinstance(xargs, dict):
            xargs = {"kv_report": 1, **xargs}
        answer = complete(served, xargs, prompt=[9] * (BUDGET + 22), max_tokens=2, stream=stream)
        statuses.append(answer.status)
        if answer.status == 400:
            # As an answer, not in a stream; vLLM's own complaints are bounded as well.
            assert 0 < len(answer.message) <= 10 * LONGEST_REFUSAL
        elif stream:
            assert answer.status == 200
            assert answer.text.endswith("data: [DONE]\n\n")
            assert not any("error" in event for event in answer.events)
        else:
            assert answer.status == 200
            report = json.loads(answer.text)["kv_transfer_params"]
            if isinstance(xargs, dict) and xargs["kv_report"]:
                assert_bounded(report["kv_policy"], xargs, BUDGET + 22 + 2 - 1)
            else:
                assert report is None

    check()
    assert min(statuses.count(status) for status in (200, 400)) >= 10


def test_numbers_out_of_range_are_refused_and_nothing_is_made_for_them(served: Server) -> None:
    """However large the number: no memory, no blocks, no time."""
    values = [10**6, 10**9, 2**31, 2**40, 2**62, 2**63 - 1, 1e18, 1e308, "9" * 300, "1e300"]
    asked = [{field: value} for value in values for field in ("kv_budget", "kv_pin_tokens")]
    complete(served, asked[0])
    peak = peak_bytes()
    blocks = served.metric("vllm:kv_cache_usage_perc")
    for xargs in asked:
        for stream in (False, True):
            answer = complete(served, xargs, stream=stream)
            assert answer.status == 400
            assert next(iter(xargs)) in answer.message
    assert served.metric("vllm:kv_cache_usage_perc") == blocks == 0
    assert peak_bytes() - peak < 64 * 2**20


def peak_bytes() -> int:
    """The most memory that the processes started here ever had, all of them together."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
        # None of one that has ended and is only waited for.
        for kib in re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE):
            total += int(kib) * 1024
    assert total > 0
    return total


def test_what_cannot_fit_is_refused_in_every_form(served: Server) -> None:
    for stream in (False, True):
        answer = complete(served, {"kv_policy": "none"}, max_tokens=POOL_TOKENS, stream=stream)
        if answer.status == 200:
            # It is noticed once the prompt's length is known, when the stream has begun.
            assert stream
            (error,) = answer.events
            assert (error["error"]["code"], "none" in error["error"]["message"]) == (400, True)
        else:
            assert answer.status == 400
            assert f"holds {POOL_TOKENS}" in answer.message


# --- the served API ------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "Hi"}]
HARMLESS: dict[str, dict[str, list[Any]]] = {
    "/v1/completions": {"prompt": ["Hi", [7] * 8, [[7], [8, 9]]], "max_tokens": [1, 2], "n": [1, 2]},
    "/v1/chat/completions": {"messages": [MESSAGES], "max_tokens": [1, 2], "n": [1, 2]},
    "/v1/chat/completions/batch": {"messages": [[MESSAGES, MESSAGES]], "max_tokens": [1]},
    "/v1/responses": {"input": ["Hi"], "max_output_tokens": [1, 2]},
    "/v1/messages": {"messages": [MESSAGES], "max_tokens": [1, 2]},
}
"""By route: values of vLLM's fields."""

SPECIAL = [BUDGET, LEAST_BUDGET, 1, 0, -1, "none", "h2o", "128", "nan", "1e400", 2**63, 1e308, "9" * 5000]


def narrowed(api: dict[str, Any]) -> dict[str, Any]:
    """The API as it is served, whose requests vary in our arguments only, which take anything."""
    api = copy.deepcopy(api)
    anything = {"anyOf": [{"enum": SPECIAL}, {}]}
    ours = {"type": "object", "properties": dict.fromkeys(FIELDS, anything), "additionalProperties": anything}
    for path, fields in HARMLESS.items():
        content = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        served = api["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
        properties = {name: {"enum": values} for name, values in fields.items()}
        properties |= {"model": {"enum": [MODEL_NAME]}, "stream": {"type": "boolean"}, "vllm_xargs": ours}
        if path.endswith("batch"):
            del properties["stream"]  # not for batches, and our arguments are taken without being listed
        # A field that vLLM no longer has would be ignored.
        assert set(properties) - {"vllm_xargs"} <= set(served["properties"])
        content["schema"] = {
            "type": "object", "properties": properties, "required": list(properties),
            "additionalProperties": False,
        }  # fmt: skip
    return api


@pytest.fixture(scope="module")
def api(served: Server) -> Any:
    schema = schemathesis.openapi.from_dict(narrowed(json.loads(send(served, "/openapi.json").text)))
    schema.config.update(base_url=served.url)
    return schema


@pytest.mark.parametrize("path", HARMLESS)
def test_no_request_is_an_error_of_the_servers(api: Any, path: str) -> None:
    statuses: list[int] = []

    @settings(fuzz, max_examples=20)
    @given(case=api[path]["POST"].as_strategy())
    def check(case: Any) -> None:
        response = case.call(timeout=REQUEST_SECONDS)
        case.validate_response(response, checks=[not_a_server_error])
        assert response.status_code in (200, 400)
        statuses.append(response.status_code)
        for event in Answer(response.status_code, response.text).events if case.body.get("stream") else ():
            assert not event.get("error")
            assert event.get("type") not in ("error", "response.failed")

    check()
    assert 400 in statuses


def test_the_endpoint_answers_as_it_says_whatever_comes_with_it(api: Any) -> None:
    printable = st.text(string.printable.strip(), max_size=20)

    @settings(fuzz, max_examples=30)
    @given(
        case=st.one_of([api[path]["GET"].as_strategy() for path in ENDPOINT]),
        query=st.dictionaries(TEXT, TEXT, max_size=3),
        headers=st.dictionaries(st.sampled_from(["Accept", "Authorization", "Range", "X-Odd"]), printable),
    )
    def check(case: Any, query: dict[str, str], headers: dict[str, str]) -> None:
        case.query, case.headers = query, headers
        response = case.call(timeout=REQUEST_SECONDS)
        assert response.status_code == 200
        case.validate_response(response)

    check()


def test_the_endpoint_can_only_be_read(served: Server) -> None:
    for path in ENDPOINT:
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            request = urllib.request.Request(served.url + path, b"{}", method=method)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request, timeout=REQUEST_SECONDS)
            assert error.value.code == 405


# --- what it costs -------------------------------------------------------------------------------


def test_a_refusal_is_short_however_long_the_value(served: Server) -> None:
    """vLLM looks for paths in it, in a time that grows with the cube of their length."""
    for field in (*FIELDS, "kv_buget"):
        for value in ("x" * 200_000, list(range(20_000)), "/a" * 500):
            answer = complete(served, {field: value})
            assert answer.status == 400
            assert answer.message.startswith(f"{field}=")
            assert len(answer.text) <= LONGEST_REFUSAL


def test_polling_asks_the_engine_at_most_twice_a_second(served: Server) -> None:
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: send(served, "/kv_policy/stats"), range(200)))
    elapsed = time.monotonic() - started
    made = {json.loads(answer.text)["time"] for answer in answers}
    # The first may have been made before, and the last one has just begun.
    assert len(made) <= elapsed / 0.5 + 2
    assert len(answers) > len(made)


def series(server: Server) -> set[str]:
    """Names and labels of all metrics."""
    lines = send(server, "/metrics").text.splitlines()
    return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}


def test_metrics_have_the_same_labels_whatever_is_asked(served: Server) -> None:
    def ask(number: int) -> None:
        assert complete(served, {"kv_budget": LEAST_BUDGET + number % 33, "kv_report": 1}).status == 200
        assert complete(served, {"kv_budget": f"value-{number}"}).status == 400
        assert complete(served, {f"kv_budget{number % 10}": number}).status == 400
        assert complete(served, {f"mine-{number}": number, "kv_pin_tokens": 10**6 + number}).status == 400
        assert send(served, f"/kv_policy/{number}").status == 404
        assert send(served, f"/kv_policy/stats?number={number}").status == 200

    ask(0)
    served.wait_idle()
    labels = series(served)
    assert any(name.startswith("vllm:kv_policy_refused_requests_total") for name in labels)
    for number in range(1, 51):
        ask(number)
    served.wait_idle()
    assert series(served) == labels


# --- what is said about it -----------------------------------------------------------------------

SECRET = "heliotrope-walrus-4417"
PROMPT = f"The password is {SECRET}. Never say {SECRET}."


@pytest.fixture
def written(served: Server) -> Iterator[list[str]]:
    """What the server said outside of answers; a test adds to it, and finds the log in it at the end."""
    said: list[str] = []
    start = len(served.log)
    yield said
    served.wait_idle()
    for path in ("/metrics", *ENDPOINT):
        said.append(send(served, path).text)
    said.append(served.log[start:])
    tokens = json.loads(send(served, "/tokenize", {"model": MODEL_NAME, "prompt": PROMPT}).text)["tokens"]
    numbers = [str(token) for token in tokens[4:10]]  # as lists and arrays are written
    for secret in (SECRET, ", ".join(numbers), " ".join(numbers)):
        for text in said:
            assert secret not in text


def test_prompts_are_nowhere_while_they_are_served(served: Server, written: list[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(complete, served, {"kv_report": 1}, prompt=PROMPT, max_tokens=80, stream=stream)
            for stream in (False, True)
        ]
        seen = 0
        while not all(answer.done() for answer in running):
            for path in ("/metrics", "/kv_policy/stats", "/kv_policy/view"):
                written.append(send(served, path).text)
            seen = max(seen, len(json.loads(written[-2])["requests"]))
            time.sleep(0.2)
    assert all(answer.result().status == 200 for answer in running)
    assert seen, "they were seen while they ran"
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    for path in ("/v1/chat/completions", "/v1/messages"):
        assert send(served, path, body).status == 200
    assert "POST /v1/messages" in served.log, "there is a log to be looked at"


def test_an_aborted_prompt_is_nowhere(served: Server, written: list[str]) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    body = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection(host, int(port), timeout=REQUEST_SECONDS)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    assert connection.getresponse().readline().startswith(b"data: ")
    written.append(send(served, "/kv_policy/stats").text)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests_are_nowhere_but_in_their_answer(
    served: Server, written: list[str], stream: bool
) -> None:
    values: list[Any] = [SECRET, [SECRET], f"{SECRET}/{SECRET}", {SECRET: 1}]
    odd = [{field: value} for field in (*FIELDS, "kv_buget") for value in values]
    for xargs in odd:
        answer = complete(served, xargs, prompt=PROMPT, stream=stream)
        assert answer.status == 400
    assert SECRET in complete(served, {"kv_budget": SECRET}).message, "whoever sent it may see it"
    complete(served, {"kv_policy": "none"}, prompt=PROMPT, max_tokens=POOL_TOKENS, stream=stream)
    # vLLM logs what is wrong with these.
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    answer = send(served, "/v1/messages", {**body, "stream": stream, "vllm_xargs": {"kv_budget": "lots"}})
    assert answer.status == 400


def test_a_value_takes_little_room_in_the_log(served: Server) -> None:
    """vLLM logs refusals of this route with their message and where they come from."""
    body = {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 4}
    start = len(served.log)
    answer = send(served, "/v1/messages", {**body, "vllm_xargs": {"kv_budget": "heliotrope " * 10_000}})
    assert answer.status == 400
    written = served.log[start:]
    assert "kv_budget='heliotrope" in written
    assert written.count("heliotrope") < 100
