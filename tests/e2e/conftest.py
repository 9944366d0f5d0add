"""One server for all HTTP tests: starting it takes longer than most of them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import BLOCK_SIZE, BUDGET, CHUNK, MAX_MODEL_LEN, MODEL_NAME, NUM_BLOCKS, Server


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """150 blocks of 32 tokens: 4,800, where one request of 8,192 is promised.

    vLLM alone refuses to start like this ("To serve at least one request ..."). float32, because outputs
    are compared between batches.
    """
    options = {
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET,
        "--block-size": BLOCK_SIZE,
        "--num-gpu-blocks-override": NUM_BLOCKS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-batched-tokens": CHUNK,
        "--dtype": "float32",
        # The model likes to end its JSON with blank lines until max_tokens.
        "--structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
    }
    arguments = [str(word) for option in options.items() for word in option]
    log_path = tmp_path_factory.mktemp("server") / "server.log"
    with Server(log_path, *arguments, "--enforce-eager") as running:
        yield running


@pytest.fixture(scope="package")
def text(server: Server) -> list[int]:
    """About 10,000 tokens of English."""
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    request = urllib.request.Request(
        f"{server.url}/tokenize",
        data=json.dumps({"model": MODEL_NAME, "prompt": license_text * 4}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        tokens: list[int] = json.load(response)["tokens"]
    return tokens
