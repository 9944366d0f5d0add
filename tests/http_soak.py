"""Random clients of a real server: streams, samples, JSON, conversations, limits, and those that leave.

python -m tests.http_soak --minutes 20        # in the environment of the tests
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.e2e.servers import MODEL_NAME, Server

CLIENTS = 6
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 30},
        "people": {"type": "integer", "maximum": 10**8},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
_WORDS = (
    *("river", "teacher", "engine", "seven", "quiet", "morning", "letter", "green", "north", "window"),
    *("budget", "token", "paper", "stone", "garden", "music", "table", "winter", "doctor", "island"),
)


class Clients:
    """Requests of all kinds, drawn from a seed, and what became of them."""

    def __init__(self, server: Server, seed: int, longest_words: int) -> None:
        self._server = server
        self._longest = longest_words
        self._draw = random.Random(seed)
        self.counts: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        """Keep ``CLIENTS`` busy for a while; raises what no client should see."""
        ends = time.monotonic() + seconds
        async with self._server.async_client as client:
            await asyncio.gather(*(self._client(client, ends) for _ in range(CLIENTS)))

    async def _client(self, client: openai.AsyncOpenAI, ends: float) -> None:
        kinds = (self._whole, self._stream, self._leave, self._samples, self._json, self._talk, self._wrong)
        while time.monotonic() < ends:
            kind = self._draw.choice(kinds)
            await kind(client)
            self.counts[kind.__name__.strip("_")] += 1
            self.counts["requests"] += 1

    def _text(self) -> str:
        draw = self._draw
        length = draw.choice([draw.randint(1, 40), draw.randint(40, 150), draw.randint(150, self._longest)])
        return " ".join(draw.choices(_WORDS, k=length))

    def _options(self, **more: Any) -> dict[str, Any]:
        draw = self._draw
        limits = draw.choice([{}, {}, {"kv_budget": draw.randint(128, 256)}, {"kv_pin_tokens": 96}])
        extra: dict[str, Any] = {"vllm_xargs": {**limits, "kv_report": 1}, "ignore_eos": draw.random() < 0.5}
        return {
            "model": MODEL_NAME, "max_tokens": draw.choice([1, draw.randint(2, 60), draw.randint(60, 300)]),
            "temperature": draw.choice([0.0, 1.0]), "extra_body": extra, **more,
        }  # fmt: skip

    async def _whole(self, client: openai.AsyncOpenAI) -> None:
        options = self._options()
        answer = await client.completions.create(prompt=self._text(), **options)
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= options["max_tokens"]
        report = answer.kv_transfer_params["kv_policy"]  # type: ignore[attr-defined]
        assert report["live_tokens"] < 256
        computed = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        assert report["live_tokens"] + report["evicted_tokens"] == computed
        self.counts["evicted tokens reported"] += report["evicted_tokens"]

    async def _stream(self, client: openai.AsyncOpenAI) -> None:
        chunks = await client.completions.create(prompt=self._text(), stream=True, **self._options())
        reasons = [chunk.choices[0].finish_reason async for chunk in chunks if chunk.choices]
        assert reasons[-1] in ("length", "stop")
        assert not any(reasons[:-1])

    async def _leave(self, client: openai.AsyncOpenAI) -> None:
        """Read some of a stream and close the connection."""
        options = self._options(max_tokens=400)
        options["extra_body"]["ignore_eos"] = True
        chunks = await client.completions.create(prompt=self._text(), stream=True, **options)
        left = self._draw.randint(0, 30)
        async for _ in chunks:
            if left == 0:
                break
            left -= 1
        await chunks.close()

    async def _samples(self, client: openai.AsyncOpenAI) -> None:
        options = self._options(n=self._draw.randint(2, 3), temperature=1.0)
        answer = await client.completions.create(prompt=self._text(), **options)
        assert sorted(choice.index for choice in answer.choices) == list(range(options["n"]))

    async def _json(self, client: openai.AsyncOpenAI) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA, "strict": True}}
        messages = [{"role": "user", "content": f"Name a city. {self._text()}"}]
        options = self._options(max_tokens=120, response_format=schema)
        options["extra_body"]["ignore_eos"] = False
        answer = await client.chat.completions.create(messages=messages, **options)
        if answer.choices[0].finish_reason == "stop":
            assert set(json.loads(answer.choices[0].message.content or "")) == {"city", "people"}
            self.counts["complete JSON"] += 1

    async def _talk(self, client: openai.AsyncOpenAI) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(self._draw.randint(2, 4)):
            messages.append({"role": "user", "content": self._text()})
            answer = await client.chat.completions.create(messages=messages, **self._options())
            messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})

    async def _wrong(self, client: openai.AsyncOpenAI) -> None:
        wrong = self._draw.choice(
            [{"kv_budget": 10**6}, {"kv_pin_tokens": 0}, {"kv_policy": "x"}, {"kv_bugdet": 9}]
        )
        options = self._options(extra_body={"vllm_xargs": wrong}, stream=self._draw.random() < 0.5)
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            await client.completions.create(prompt=self._text(), **options)


def resident_mib(server: Server) -> int:
    """Of the server's processes together, without pages that they share."""
    parent = psutil.Process(server.pid)
    processes = [parent, *parent.children(recursive=True)]
    return sum(process.memory_full_info().uss for process in processes) >> 20


def soak(server: Server, seconds: float, seed: int, longest_words: int = 1500) -> Counter[str]:
    """Let clients come and go for a while, and see that nothing of them is left.

    Returns:
        Requests of each kind, and resident memory in MiB after a third of the time and at the end.
    """
    clients = Clients(server, seed, longest_words)
    asyncio.run(clients.run(seconds / 3))
    server.wait_idle()
    before = resident_mib(server)
    asyncio.run(clients.run(seconds * 2 / 3))
    server.wait_idle()
    clients.counts["MiB at a third"], clients.counts["MiB at the end"] = before, resident_mib(server)
    return clients.counts


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    flags = (
        *("--kv-policy", "h2o", "--kv-budget", "256", "--kv-prompt-budget", "2048", "--block-size", "32"),
        *("--num-gpu-blocks-override", "150", "--max-model-len", "8192", "--max-num-batched-tokens", "512"),
        *("--enforce-eager",),
    )
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "server.log", *flags) as server:
        print(dict(soak(server, 60 * options.minutes, options.seed)), flush=True)
        for name, value in sorted(server.metrics().samples.items()):
            if ("kv_policy" in name and "bucket" not in name) or "preemptions_total" in name:
                print(name, value)


if __name__ == "__main__":
    main()
