"""What an operator sees of the policy over HTTP, and what a client may ask of it for one request."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.servers import BLOCK_SIZE, BUDGET, MODEL_NAME, NUM_BLOCKS, Server
from vllm_h2o import retention

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def _idle_afterwards(server: Server) -> Iterator[None]:
    yield
    server.wait_idle()


def ask(server: Server, prompt: list[int], max_tokens: int, **xargs: Any) -> Any:
    return server.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True, "vllm_xargs": xargs},
    )  # fmt: skip


def evicted_tokens(computed: int, budget: int = BUDGET) -> int:
    return BLOCK_SIZE * retention.evicted_blocks(computed, budget_tokens=budget, block_size=BLOCK_SIZE)


def test_metrics_follow_from_the_lengths(server: Server, text: list[int]) -> None:
    before = server.metrics()
    ask(server, text[:700], 40)
    server.wait_idle()
    after = server.metrics()

    def more(name: str) -> float:
        return after.total(f"vllm:kv_policy_{name}") - before.total(f"vllm:kv_policy_{name}")

    # vLLM schedules a step while the last one runs, and what that settles goes with the request.
    possible = [evicted_tokens(700 + 40 - unsettled) for unsettled in (1, 2, 3)]
    assert more("evicted_tokens_total") in possible
    assert more("evicted_blocks_total") == more("evicted_tokens_total") / BLOCK_SIZE
    assert more("requests_evicted_total") == 1
    assert more("compaction_seconds_count") >= 3
    assert after.total("vllm:kv_policy_live_tokens") == 0
    assert after.total("vllm:kv_policy_logical_tokens") == 0
    assert after.total("vllm:kv_policy_requests_over_budget") == 0


def test_a_report_says_what_became_of_the_request(server: Server, text: list[int]) -> None:
    report = ask(server, text[:700], 40, kv_report=1, kv_budget=160).kv_transfer_params["kv_policy"]
    evicted = evicted_tokens(739, 160)
    assert report == {"evicted_tokens": evicted, "live_tokens": 739 - evicted, "budget_tokens": 160}
    chat = server.client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": "Hi"}], max_tokens=4,
        extra_body={"vllm_xargs": {"kv_report": 1}},
    )  # fmt: skip
    assert chat.kv_transfer_params["kv_policy"]["evicted_tokens"] == 0
    assert ask(server, text[:300], 4).kv_transfer_params is None


def test_a_request_without_the_policy_keeps_everything(server: Server, text: list[int]) -> None:
    before = server.metrics().total("vllm:kv_policy_evicted_tokens_total")
    answer = ask(server, text[:1000], 20, kv_policy="none", kv_report=1)
    assert answer.kv_transfer_params["kv_policy"]["evicted_tokens"] == 0
    assert answer.kv_transfer_params["kv_policy"]["live_tokens"] == 1019
    server.wait_idle()
    assert server.metrics().total("vllm:kv_policy_evicted_tokens_total") == before


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"kv_budget": BUDGET + 1}, f"over the server's budget of {BUDGET} tokens"),
        ({"kv_budget": "lots"}, "kv_budget='lots': it is not a finite number"),
        ({"kv_budget": [1, 2]}, "not a finite number"),
        ({"kv_pin_tokens": 1}, "a whole number of at least 32"),
        ({"kv_policy": "h2o"}, "a request can't choose a policy"),
        ({"kv_buget": 128}, "Write kv_budget"),
    ],
)
def test_a_bad_value_is_a_400_that_says_the_range(
    server: Server, text: list[int], xargs: dict[str, Any], message: str, stream: bool
) -> None:
    before = server.metrics().total("vllm:kv_policy_refused_requests_total")
    with pytest.raises(openai.BadRequestError) as error:
        server.client.completions.create(
            model=MODEL_NAME, prompt=text[:20], max_tokens=4, stream=stream, extra_body={"vllm_xargs": xargs}
        )
    assert error.value.status_code == 400
    assert message in str(error.value)
    assert error.value.param == next(iter(xargs))
    assert server.metrics().total("vllm:kv_policy_refused_requests_total") == before + 1


def test_what_cannot_fit_is_refused(server: Server, text: list[int]) -> None:
    pool = (NUM_BLOCKS - 1) * BLOCK_SIZE
    with pytest.raises(openai.BadRequestError, match=f"the KV cache holds {pool}"):
        ask(server, text[:40], pool, kv_policy="none")


def test_a_chat_may_ask_as_well(server: Server) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Hi"}],
        "vllm_xargs": {"kv_budget": 1},
    }
    request = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(request, timeout=60)
    assert error.value.code == 400
    assert "can't hold" in json.load(error.value)["error"]["message"]
