#!/usr/bin/env python3
"""Serves a small model on the CPU with a bounded KV cache, and sends it one long prompt.

Run `python3 scripts/quickstart.py` on a bare Python 3.11, 3.12 or 3.13. The first run makes `.venv`
and the model (a few minutes, mostly downloads); later ones start the server at once.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import fetch_model
from model_store import StoreError
from server_metrics import KV_USAGE, Peaks
from server_process import HOST, Server, ServerError, check_port, free_port
from setup_env import enter_environment
from setup_steps import OFFLINE_ENVIRONMENT, ROOT, VENV, SetupError

MODEL_NAME = "SmolLM2-135M-Instruct"
BUDGET_TOKENS = 512
BLOCK_TOKENS = 32
NUM_BLOCKS = 150
# Ample for those blocks. Left to itself the server claims nearly all of the machine's memory, and
# doesn't start when a part of that is in use.
KV_CACHE_BYTES = 512 * 1024**2
MAX_MODEL_TOKENS = 8192
CHUNK_TOKENS = 512
ANSWER_TOKENS = 64
# 174 lines come to about 3,000 tokens of this model.
PROMPT_LINES = 174

_START_SECONDS = 600.0
_REQUEST_SECONDS = 600.0


def server_command(model: Path, port: int) -> list[str]:
    """Return the command that serves `model` on `port` with the H2O policy."""
    options = {
        "--served-model-name": MODEL_NAME,
        "--host": HOST,
        "--port": port,
        "--kv-policy": "h2o",
        "--kv-budget": BUDGET_TOKENS,
        "--block-size": BLOCK_TOKENS,
        "--num-gpu-blocks-override": NUM_BLOCKS,
        "--kv-cache-memory-bytes": KV_CACHE_BYTES,
        "--max-model-len": MAX_MODEL_TOKENS,
        "--max-num-batched-tokens": CHUNK_TOKENS,
        # Seconds; without it vLLM ends its own processes by force.
        "--shutdown-timeout": 15,
    }
    arguments = [str(word) for option in options.items() for word in option]
    return [str(VENV / "bin" / "vllm"), "serve", str(model), *arguments, "--enforce-eager"]


def long_prompt(lines: int = PROMPT_LINES) -> str:
    """Return the same text on every run: `lines` entries of a record, and a question on them."""
    people = ("Anna", "Boris", "Chen", "Dora", "Emil", "Farah", "Goran")
    places = ("harbour", "mill", "market", "school", "station")
    things = ("apples", "lamps", "books")
    entries = [
        f"Day {day}: {people[day % 7]} brought {10 + day * 37 % 90} {things[day % 3]} "
        f"to the {places[day % 5]}."
        for day in range(1, lines + 1)
    ]
    question = "In one sentence, what do the people in this record bring, and where to?"
    return "\n".join(["Here is a record of deliveries.", *entries, question])


def ask(server_url: str, prompt: str) -> tuple[int, int]:
    """Send `prompt`, print the answer as it comes, return the tokens in the prompt and answer."""
    from openai import OpenAI

    # vLLM asks for no key, but the client refuses to be without one. A failed request is not sent
    # again: it would hide the failure.
    client = OpenAI(base_url=f"{server_url}/v1", api_key="none", timeout=_REQUEST_SECONDS, max_retries=0)
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=ANSWER_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    usage = None
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        usage = chunk.usage or usage
    print(flush=True)
    if usage is None:
        raise ServerError("the server's answer ended without saying how many tokens it took")
    return usage.prompt_tokens, usage.completion_tokens


def run_request(server: Server) -> None:
    """Send the long prompt and print what it cost, checked against the server's metrics."""
    from vllm_h2o.retention import evicted_blocks

    print("\nAnswer: ", end="", flush=True)
    started = time.monotonic()
    with Peaks(server.url, [KV_USAGE]) as peaks:
        prompt_tokens, answer_tokens = ask(server.url, long_prompt())
    seconds = time.monotonic() - started
    # One block is a placeholder that is never handed out, and not counted as a part of the cache.
    peak_blocks = round(peaks.highest[KV_USAGE] * (NUM_BLOCKS - 1))

    # The last token of the answer is never computed: nothing follows from it.
    computed = prompt_tokens + answer_tokens - 1
    full = -(-computed // BLOCK_TOKENS)
    freed = evicted_blocks(computed, budget_tokens=BUDGET_TOKENS, block_size=BLOCK_TOKENS)
    print(
        f"\nUsage: {prompt_tokens} tokens of prompt, {answer_tokens} of answer, {seconds:.1f} s\n"
        f"KV cache: {computed} tokens fill {full} blocks of {BLOCK_TOKENS}; with a budget of "
        f"{BUDGET_TOKENS} tokens, H2O freed {freed} of them on the way\n"
        f"Most blocks in use at once: {peak_blocks} (from {peaks.num_samples} readings of /metrics)",
        flush=True,
    )
    if not 0 < peak_blocks < full:
        raise ServerError(
            f"the server had {peak_blocks} blocks in use at most, which should be more than 0 and "
            f"fewer than the {full} that the request fills without H2O"
        )


def _exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    # Through the normal way out, which stops the server.
    sys.exit(128 + signum)


def _run(port: int | None, *, keep: bool) -> None:
    model = fetch_model.DEFAULT_TARGET
    fetch_model.fetch(model)
    if port is None:
        port = free_port()
    else:
        check_port(port)
    command = server_command(model, port)
    log_path = ROOT / "logs" / "quickstart.log"
    print(f"\nStarting: {' '.join(command)}\nIts whole log: {log_path}", flush=True)
    with Server(command, port=port, log_path=log_path, environment=OFFLINE_ENVIRONMENT) as server:
        seconds = server.wait_until_ready(_START_SECONDS)
        print(f"Ready on {server.url} after {seconds:.0f} s (process {server.pid})", flush=True)
        run_request(server)
        if keep:
            print(f"\nServing {MODEL_NAME} on {server.url}/v1 until you press Ctrl-C.", flush=True)
            # Here Ctrl-C is the ordinary end.
            with contextlib.suppress(KeyboardInterrupt):
                server.wait()
        print("\nStopping the server ...", flush=True)
    print("Done.", flush=True)


def main() -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--port", type=int, help="port on loopback (default: any free one)")
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        enter_environment({"model"}, __file__)
        _run(options.port, keep=options.keep)
    except (SetupError, StoreError, ServerError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the server, if it was started, is stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
