"""Reads a vLLM server's Prometheus metrics, once or over and over while something runs.

Standard library only.
"""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Sequence
from types import TracebackType

KV_USAGE = "vllm:kv_cache_usage_perc"

_SAMPLE = re.compile(r"^([\w:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_INTERVAL_SECONDS = 0.05
_TIMEOUT_SECONDS = 30.0


def parse(text: str, names: Sequence[str]) -> dict[str, float]:
    """Return the value of each of `names` in the text of /metrics, summed over its labels."""
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        if name in names:
            values[name] = values.get(name, 0.0) + float(value)
    for name in names:
        if name not in values:
            raise ValueError(f"the server's /metrics has no {name}")
    return values


def read(server_url: str, names: Sequence[str]) -> dict[str, float]:
    """Return the values that the server has right now."""
    with urllib.request.urlopen(f"{server_url}/metrics", timeout=_TIMEOUT_SECONDS) as response:
        return parse(response.read().decode(), names)


class Peaks:
    """The highest values of some metrics, sampled in the background while the `with` block runs.

    What it finds can only be too low: a peak between two samples is missed.
    """

    def __init__(
        self, server_url: str, names: Sequence[str], interval_seconds: float = _INTERVAL_SECONDS
    ) -> None:
        self._url = server_url
        self._names = names
        self._interval_seconds = interval_seconds
        self.highest = dict.fromkeys(names, 0.0)
        self.num_samples = 0
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        # If the block failed by itself that is the error to show; this one likely follows from it.
        if self._error is not None and error is None:
            raise self._error

    def _sample(self) -> None:
        try:
            while not self._done.wait(self._interval_seconds):
                for name, value in read(self._url, self._names).items():
                    self.highest[name] = max(self.highest[name], value)
                self.num_samples += 1
        except (OSError, ValueError) as problem:
            # Raised in the thread that waits for the result, by __exit__.
            self._error = problem
