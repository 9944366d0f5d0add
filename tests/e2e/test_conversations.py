"""Chats of several turns: what earlier turns left in the prefix cache saves work and changes no answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import MODEL_NAME, Server

pytestmark = pytest.mark.e2e

BLOCK, BUDGET, HALF_LIFE = 32, 256, 8
OWN = 24 * HALF_LIFE
"""Newest tokens of a prompt that every request computes itself."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = {
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET,
        "--kv-prompt-budget": 2048,
        "--kv-score-half-life": HALF_LIFE,
        "--block-size": BLOCK,
        "--num-gpu-blocks-override": 300,
        "--max-model-len": 4096,
        "--dtype": "float32",
    }
    words = [str(word) for option in options.items() for word in option]
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with Server(log_path, *words, "--enforce-eager", "--enable-prompt-tokens-details") as running:
        yield running


def chat(server: Server, messages: list[dict[str, str]], salt: str) -> tuple[str, int, int]:
    """The answer, the prompt's tokens and how many of them came from the cache."""
    answer = server.client.chat.completions.create(
        model=MODEL_NAME, messages=messages, max_tokens=48, temperature=0, extra_body={"cache_salt": salt}
    )  # type: ignore[arg-type]
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    cached = details.cached_tokens or 0 if details is not None else 0
    return answer.choices[0].message.content or "", answer.usage.prompt_tokens, cached


def test_every_turn_is_answered_as_if_it_were_the_first(server: Server) -> None:
    """The same messages under a salt of their own find nothing in the cache, as vLLM promises."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:3500]
    questions = ("What is this text about?", "Who may use it?", "And what about warranties?")
    messages: list[dict[str, str]] = []
    found = []
    for turn, question in enumerate(questions):
        content = f"{text}\n\n{question}" if turn == 0 else question
        messages.append({"role": "user", "content": content})
        answer, length, cached = chat(server, messages, "the conversation")
        alone, _, cached_alone = chat(server, messages, f"turn {turn}")
        assert answer == alone
        assert cached_alone == 0
        found.append((length, cached))
        messages.append({"role": "assistant", "content": answer})
    (first, cached), *later = found
    assert cached == 0
    assert BUDGET + OWN < first < 2048 - 300
    before = first
    for length, cached in later:
        left = BLOCK + ((before - BUDGET) // BLOCK + 1) * BLOCK
        assert cached == min(left, (length - OWN) // BLOCK * BLOCK)
        before = length
    # Eviction goes on meanwhile, and everything comes back.
    assert server.metric("vllm:kv_policy_evicted_tokens_total") > 0
    server.wait_idle()
