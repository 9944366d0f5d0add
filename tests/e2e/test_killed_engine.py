"""The engine's process is killed: clients and the log are told, the server ends, and a new one serves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from server_process import ServerError
from tests.e2e.servers import MODEL_NAME, Server

pytestmark = pytest.mark.e2e

OPTIONS = (
    *("--kv-policy", "h2o", "--kv-budget", "256", "--block-size", "32", "--num-gpu-blocks-override", "80"),
    *("--max-model-len", "2048", "--enforce-eager"),
)
EXIT_SECONDS = 60.0


def engine_process(server: Server) -> psutil.Process:
    """The only child of the API server that computes."""
    children = psutil.Process(server.pid).children(recursive=True)
    (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    return engine


async def answers_while_killed(server: Server) -> list[Any]:
    """Requests that evict, under way when the engine dies: streamed ones and others."""

    async def stream(client: openai.AsyncOpenAI) -> int:
        chunks = await client.completions.create(
            model=MODEL_NAME, prompt=[7] * 300, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        return len([chunk async for chunk in chunks])

    async def whole(client: openai.AsyncOpenAI) -> Any:
        return await client.completions.create(
            model=MODEL_NAME, prompt=[9] * 300, max_tokens=1500, extra_body={"ignore_eos": True}
        )

    async with server.async_client as client:
        requests = [asyncio.create_task(ask(client)) for ask in (stream, whole, stream)]
        await asyncio.sleep(3)
        engine_process(server).kill()
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), EXIT_SECONDS)


def test_a_killed_engine_ends_the_server_and_a_new_one_serves(tmp_path: Path) -> None:
    with Server(tmp_path / "first.log", *OPTIONS) as server:
        outcomes = asyncio.run(answers_while_killed(server))
        # Nobody waits for ever or takes what came so far for the whole answer.
        assert all(isinstance(outcome, openai.APIError) for outcome in outcomes), outcomes
        with pytest.raises(ServerError, match="exited"):
            server.wait(EXIT_SECONDS)
        assert "EngineDeadError" in server.log
    with Server(tmp_path / "second.log", *OPTIONS) as server:
        answer = server.client.completions.create(
            model=MODEL_NAME, prompt=[7] * 300, max_tokens=200, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 200
        assert server.metric("vllm:kv_policy_evicted_tokens_total") > 0
