"""One server over HTTP: every kind of request, load, disconnects; after each test it is idle and alive.

Its KV cache (4,800 tokens) holds less than one request of ``max_model_len`` (8,192) would fill, and the
budget is 256 tokens, so nearly every request here is evicted from.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from tests.e2e.servers import (
    BLOCK_SIZE,
    BUDGET,
    CHUNK,
    MAX_MODEL_LEN,
    MODEL_NAME,
    NUM_BLOCKS,
    Server,
)
from tests.http_soak import soak
from vllm_h2o.retention import max_blocks_held

pytestmark = pytest.mark.e2e

# Often enough for steps of a quarter of a second and more; each reading takes the server's time as well.
_POLL_SECONDS = 0.2


@pytest.fixture(autouse=True)
def _idle_afterwards(server: Server) -> Iterator[None]:
    yield
    server.wait_idle()


@dataclass(frozen=True)
class Answer:
    """A greedy completion, one logprob per token."""

    token_ids: list[int]
    logprobs: list[float]


def answer(server: Server, prompt: list[int], max_tokens: int, **extra: Any) -> Answer:
    """Greedy completion of exactly ``max_tokens`` tokens; ``extra`` goes to ``completions.create``."""
    body = {"ignore_eos": True, "return_token_ids": True, **extra.pop("extra_body", {})}
    completion = server.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, temperature=0, logprobs=0, extra_body=body,
        **extra,
    )  # fmt: skip
    (choice,) = completion.choices
    assert choice.finish_reason == "length"
    assert completion.usage.completion_tokens == max_tokens
    assert completion.usage.prompt_tokens == len(prompt)
    return Answer(choice.model_extra["token_ids"], choice.logprobs.token_logprobs)


def answers(server: Server, requests: Sequence[tuple[list[int], int]]) -> list[Answer]:
    """``answer`` for each (prompt, max_tokens), all at once."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: answer(server, *request), requests))


def assert_same(answer: Answer, expected: Answer) -> None:
    """Same tokens, and logprobs as close as float32 sums in another order are."""
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


@dataclass
class Watched:
    """What ``watching`` saw: the most requests and blocks at once, counters that went down."""

    most_running: float = 0
    most_usage: float = 0
    decreased: list[str] = field(default_factory=list)


@contextmanager
def watching(server: Server) -> Iterator[Watched]:
    """Polls the metrics in the background while the block runs."""
    watched, done = Watched(), threading.Event()
    errors: list[Exception] = []

    def poll() -> None:
        before: dict[str, float] = {}
        try:
            while not done.wait(_POLL_SECONDS):
                now = server.metrics()
                counters = now.counters()
                watched.decreased += [key for key, value in before.items() if counters[key] < value]
                before = counters
                watched.most_running = max(watched.most_running, now.total("vllm:num_requests_running"))
                watched.most_usage = max(watched.most_usage, now.total("vllm:kv_cache_usage_perc"))
        except Exception as error:  # raised below, in the thread of the test
            errors.append(error)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


# --- kinds of requests ---------------------------------------------------------------------------


def test_chat(server: Server) -> None:
    completion = server.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=20,
        temperature=0,
    )
    assert "Paris" in completion.choices[0].message.content
    assert completion.choices[0].finish_reason == "stop"


def test_chat_about_text_far_over_the_budget(server: Server) -> None:
    lines = [f"Day {day}: Anna brought {10 + day * 37 % 90} apples to the harbour." for day in range(1, 61)]
    completion = server.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "\n".join([*lines, "What did Anna bring every day?"])}],
        max_tokens=30,
        temperature=0,
    )
    assert completion.usage.prompt_tokens > 3 * BUDGET
    assert "apples" in completion.choices[0].message.content


def test_streaming_gives_the_same_text_and_the_usage(server: Server, text: list[int]) -> None:
    request = {
        "model": MODEL_NAME,
        "prompt": text[:245],
        "max_tokens": 25,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    whole = server.client.completions.create(**request)
    chunks = list(
        server.client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.usage.prompt_tokens == 245
    assert whole.usage.completion_tokens == 25


def test_logprobs(server: Server) -> None:
    completion = server.client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "Count from one to ten in words."}],
        max_tokens=20,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    tokens = completion.choices[0].logprobs.content
    assert len(tokens) == completion.usage.completion_tokens
    for token in tokens:
        best = token.top_logprobs
        assert len(best) == 3
        assert token.token == best[0].token
        assert 0 >= best[0].logprob >= best[1].logprob >= best[2].logprob
        assert sum(math.exp(other.logprob) for other in best) <= 1 + 1e-3


def test_two_samples_of_one_prompt(server: Server, text: list[int]) -> None:
    # They share the pinned block, and each loses tokens of its own. vLLM refuses a temperature of 0 here.
    both = server.client.completions.create(
        model=MODEL_NAME, prompt=text[100:345], max_tokens=25, temperature=1, n=2,
        extra_body={"top_k": 1, "ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    single = answer(server, text[100:345], 25)
    assert [choice.model_extra["token_ids"] for choice in both.choices] == [single.token_ids] * 2


def test_stop_string(server: Server) -> None:
    request = {
        "model": MODEL_NAME,
        "prompt": "One, two, three, four, five, six,",
        "max_tokens": 30,
        "temperature": 0,
    }
    free = server.client.completions.create(**request).choices[0].text
    stop = free.split()[2]
    stopped = server.client.completions.create(**request, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == free[: free.index(stop)]


def test_prompt_logprobs_short_and_long(server: Server, text: list[int]) -> None:
    def prompt_logprobs(length: int) -> list[float]:
        completion = server.client.completions.create(
            model=MODEL_NAME, prompt=text[:length], max_tokens=1, extra_body={"prompt_logprobs": 1}
        )
        first, *others = completion.choices[0].model_extra["prompt_logprobs"]
        assert first is None
        assert len(others) == length - 1
        given = zip(text[1:length], others, strict=True)
        return [candidates[str(token)]["logprob"] for token, candidates in given]

    short, long, short_again = (
        prompt_logprobs(CHUNK),
        prompt_logprobs(2 * CHUNK - 100),
        prompt_logprobs(CHUNK),
    )
    assert all(-50 < logprob <= 0 for logprob in long)
    assert short_again == pytest.approx(short, abs=1e-3)
    # Nothing was evicted before the end of the first chunk.
    assert long[: CHUNK - 1] == pytest.approx(short, abs=1e-3)


@pytest.mark.parametrize(
    ("prompt", "answered"),
    [
        pytest.param("", False, id="empty-text"),
        pytest.param([], False, id="no-tokens"),
        pytest.param([5], True, id="one-token"),
        pytest.param([5] * BLOCK_SIZE, True, id="one-block"),
        pytest.param([5] * BUDGET, True, id="exactly-the-budget"),
        pytest.param([5] * (BUDGET - 1), True, id="one-less-than-the-budget"),
        pytest.param([5] * CHUNK, True, id="exactly-one-chunk"),
        pytest.param([5] * (CHUNK + 1), True, id="one-more-than-a-chunk"),
        pytest.param([5, 49152], False, id="first-id-past-the-vocabulary"),
        pytest.param([10**9], False, id="huge-id"),
        pytest.param([-1], False, id="negative-id"),
        pytest.param([5] * MAX_MODEL_LEN, False, id="no-room-for-an-answer"),
        pytest.param([5] * 100_000, False, id="far-too-long"),
    ],
)
def test_odd_prompts(server: Server, prompt: str | list[int], answered: bool) -> None:
    request = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 3, "extra_body": {"ignore_eos": True}}
    if answered:
        assert server.client.completions.create(**request).usage.completion_tokens == 3
    else:
        with pytest.raises(openai.APIStatusError) as error:
            server.client.completions.create(**request)
        assert 400 <= error.value.status_code < 500


def test_same_request_id_twice_at_once(server: Server, text: list[int]) -> None:
    prompts = [text[300:545], text[1300:1540]]
    alone = [answer(server, prompt, 25) for prompt in prompts]
    header = {"X-Request-Id": "the-same"}
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda prompt: answer(server, prompt, 25, extra_headers=header), prompts))
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)


# --- memory --------------------------------------------------------------------------------------


def test_prompt_longer_than_the_cache_to_the_last_token(server: Server, text: list[int]) -> None:
    assert MAX_MODEL_LEN > BLOCK_SIZE * NUM_BLOCKS
    bound = max_blocks_held(
        budget_tokens=BUDGET,
        block_size=BLOCK_SIZE,
        max_in_flight_tokens=CHUNK,
        max_model_len=MAX_MODEL_LEN,
    )
    prompt = text[: MAX_MODEL_LEN - 42]
    with watching(server) as watched:
        answer(server, prompt, 42)
    # One block is vLLM's placeholder and not counted.
    assert BUDGET // BLOCK_SIZE <= round(watched.most_usage * (NUM_BLOCKS - 1)) <= bound


def test_concurrent_clients_with_short_and_long_prompts(server: Server, text: list[int]) -> None:
    # Prompts of less than the budget, of two chunks and of six; the longest short one passes it at the end.
    requests = [(text[61 * i : 61 * i + 60], 50 + 21 * i) for i in range(9)]
    requests += [(text[:720], 120), (text[720:1440], 60), (text[1000:4000], 100)]
    preemptions = server.metric("vllm:num_preemptions_total")
    with watching(server) as watched:
        answers(server, requests)
    assert watched.most_running == len(requests)
    assert not watched.decreased
    assert server.metric("vllm:num_preemptions_total") == preemptions


def test_more_requests_than_blocks(server: Server, text: list[int]) -> None:
    # Each passes the budget and needs 8 or 9 blocks by then, together more than the 149 that there are: what
    # one gives up is another's in the next step, some wait, some may be preempted in the midst of their JSON.
    word = {"type": "string", "pattern": "^[a-z]{1,12}$"}
    schema = {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": word, "minItems": 12, "maxItems": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["words", "count"],
        "additionalProperties": False,
    }

    def ask_for_json(number: int) -> str:
        completion = server.client.completions.create(
            model=MODEL_NAME,
            prompt=text[240 * number : 240 * (number + 1)],
            max_tokens=250,
            temperature=0,
            extra_body={"structured_outputs": {"json": schema}},
        )
        assert completion.choices[0].finish_reason == "stop"
        assert completion.usage.total_tokens > BUDGET
        return completion.choices[0].text

    # Under the budget until they decode, so that it doesn't matter where their prompts are cut.
    prompts = [text[5000:5235], text[6000:6240]]
    alone = [answer(server, prompt, 110) for prompt in prompts]
    preemptions = server.metric("vllm:num_preemptions_total")
    with watching(server) as watched, ThreadPoolExecutor(22) as pool:
        # The oldest requests are the last to be preempted: these never are.
        oldest = [pool.submit(answer, server, prompt, 110) for prompt in prompts]
        time.sleep(0.5)
        written = list(pool.map(ask_for_json, range(20)))
    for parsed in map(json.loads, written):
        assert len(parsed["words"]) == 12
        assert 0 <= parsed["count"] <= 99
    for future, expected in zip(oldest, alone, strict=True):
        assert_same(future.result(), expected)
    assert watched.most_usage > 0.9
    assert not watched.decreased
    assert server.metric("vllm:num_preemptions_total") - preemptions <= 20


# --- the same answer -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [BUDGET - 11, CHUNK - 12, 2 * CHUNK + 76])
def test_same_answer_twice(server: Server, text: list[int], length: int) -> None:
    # A pinned block found in the prefix cache moves the ends of the chunks, where tokens are dropped; with
    # a salt each, both requests compute all of the prompt.
    first, again = (
        answer(server, text[50 : 50 + length], 20, extra_body={"cache_salt": salt}) for salt in ("a", "b")
    )
    assert again == first


# --- disconnects ---------------------------------------------------------------------------------


async def _cut(
    client: openai.AsyncOpenAI, prompt: list[int], *, after_s: float, after_tokens: int, stream: bool
) -> int:
    """Send a request and drop the connection; returns how many tokens had come."""
    received = 0

    async def talk() -> None:
        nonlocal received
        request = {
            "model": MODEL_NAME,
            "max_tokens": 300,
            "temperature": 0,
            # The client looks at every token of its own parameter, which holds up the event loop.
            "prompt": "",
            "extra_body": {"prompt": prompt, "ignore_eos": True},
        }
        if not stream:
            await client.completions.create(**request)
            raise AssertionError("answered before it was cut")
        async with await client.completions.create(**request, stream=True) as chunks:
            async for _ in chunks:
                received += 1
                if received == after_tokens:
                    return

    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(talk(), after_s)
    return received


def test_disconnects_in_prefill(server: Server, text: list[int]) -> None:
    reference = answer(server, text[700:945], 25)

    async def cut_all() -> list[int]:
        delays = [0.05 * i for i in range(1, 37)] + [3, 3.5, 4, 4.5]
        async with server.async_client as client:
            cuts = (
                _cut(client, text[i : i + 3000], after_s=delay, after_tokens=300, stream=i % 2 == 0)
                for i, delay in enumerate(delays)
            )
            return await asyncio.gather(*cuts)

    looked_up = server.metric("vllm:prefix_cache_queries_total")
    with watching(server) as watched:
        received = asyncio.run(cut_all())
    # Of six chunks each, so that all but the last four are cut before or while one of them is computed.
    assert not any(received[:36])
    assert not watched.decreased
    server.wait_idle()
    # A prompt is looked up when it is first scheduled: some were cut while they waited, some in prefill.
    assert 3000 <= server.metric("vllm:prefix_cache_queries_total") - looked_up < 40 * 3000
    assert_same(answer(server, text[700:945], 25), reference)


def test_disconnects_in_decode(server: Server, text: list[int]) -> None:
    reference = answer(server, text[700:945], 25)

    async def cut_all() -> list[int]:
        # Every sixth passes the budget after 11 tokens.
        prompts = (text[9 * i : 9 * i + (60 if i % 6 else 245)] for i in range(30))
        async with server.async_client as client:
            cuts = (
                _cut(client, prompt, after_s=120, after_tokens=1 + i, stream=True)
                for i, prompt in enumerate(prompts)
            )
            return await asyncio.gather(*cuts)

    with watching(server) as watched:
        received = asyncio.run(cut_all())
    assert received == [1 + i for i in range(30)]
    assert watched.most_running > 1
    assert not watched.decreased
    started = time.monotonic()
    server.wait_idle()
    # Not by running all of them to their end.
    assert time.monotonic() - started < 30
    assert_same(answer(server, text[700:945], 25), reference)


def test_nothing_is_left_of_clients_of_all_kinds(server: Server) -> None:
    counts = soak(server, 30, seed=1, longest_words=400)
    kinds = ("whole", "stream", "leave", "samples", "json", "talk", "wrong")
    assert all(counts[kind] for kind in kinds), counts
    assert counts["evicted tokens reported"] > 0
