"""A real `vllm serve` for the HTTP tests, with its clients and its metrics."""

from __future__ import annotations

import os
import re
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from openai import AsyncOpenAI, OpenAI

import server_process

MODEL = os.environ.get("VLLM_H2O_MODEL", str(Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"))
MODEL_NAME = "smollm2"

VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
"""The `vllm` command of the environment that runs the tests."""

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN, CHUNK, BUDGET = 32, 150, 8192, 512, 256
"""Of the server that all HTTP tests share, in tokens; CHUNK is the most of one scheduler step."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": server_process.HOST,
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB; left to itself vLLM claims nearly all of the machine's memory
    # Tests that run engines inside their own process switch this off, for themselves only.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}

_START_SECONDS = 240.0
_REQUEST_SECONDS = 180.0
_POLL_SECONDS = 0.1

_SAMPLE = re.compile(r"^(vllm:\w+)((?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
_COUNTER = re.compile(r"_(total|count|sum|bucket)$")


@dataclass(frozen=True)
class Metrics:
    """vLLM's own metrics at one moment: name with labels -> value."""

    samples: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Metrics:
        return cls({name + labels: float(value) for name, labels, value in _SAMPLE.findall(text)})

    def total(self, name: str) -> float:
        """Sum over the labels of one metric; KeyError if there is none of that name."""
        values = [value for key, value in self.samples.items() if key.split("{")[0] == name]
        if not values:
            raise KeyError(name)
        return sum(values)

    def counters(self) -> dict[str, float]:
        """Those that can only grow: counters, and the parts of histograms."""
        return {key: value for key, value in self.samples.items() if _COUNTER.search(key.split("{")[0])}


class Server:
    """`vllm serve MODEL OPTIONS` on a free port of loopback; a context manager that stops it again.

    ``environment`` goes beside ``ENVIRONMENT``.

    Raises:
        server_process.ServerError: it ended while starting; the message has the end of its log.
    """

    def __init__(self, log_path: Path, *options: str, api_key: str = "none", **environment: str) -> None:
        port = server_process.free_port()
        self._log_path = log_path
        command = [
            *VLLM, "serve", MODEL, "--served-model-name", MODEL_NAME,
            "--host", server_process.HOST, "--port", str(port), *options,
        ]  # fmt: skip
        self._process = server_process.Server(
            command, port=port, log_path=log_path, environment={**ENVIRONMENT, **environment}
        )
        self.url = self._process.url
        self.client = OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, timeout=_REQUEST_SECONDS, max_retries=0
        )

    def __enter__(self) -> Server:
        try:
            self._process.wait_until_ready(_START_SECONDS)
        except BaseException:
            self._process.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.client.close()
        self._process.stop()

    @property
    def async_client(self) -> AsyncOpenAI:
        """A new client each time: connections belong to the event loop that opened them."""
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=_REQUEST_SECONDS, max_retries=0)

    @property
    def pid(self) -> int:
        """The API server's process, the parent of the engine's."""
        return self._process.pid

    def wait(self, timeout_seconds: float) -> None:
        """Wait until the server exits by itself; see ``server_process.Server.wait``."""
        self._process.wait(timeout_seconds)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def metrics(self) -> Metrics:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return Metrics.parse(response.read().decode())

    def metric(self, name: str) -> float:
        """One metric now, summed over its labels, for instance ``vllm:num_preemptions_total``."""
        return self.metrics().total(name)

    def wait_idle(self, timeout_seconds: float = 60.0) -> None:
        """Wait until no request runs or waits and no block is in use; fail if that doesn't come.

        A request of one token goes first: it shows that the server answers, and the gauges, which are
        written at the end of a step, are then not those of an earlier one.
        """
        self.client.completions.create(model=MODEL_NAME, prompt=[1], max_tokens=1)
        gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        deadline = time.monotonic() + timeout_seconds
        while any(left := {name: self.metric(name) for name in gauges}.values()):
            self._process.check_running("during the tests")
            assert time.monotonic() < deadline, f"not idle: {left}"
            time.sleep(_POLL_SECONDS)
