"""Reads how full a vLLM server's KV cache is from its Prometheus metrics."""

from __future__ import annotations

import re
import threading
import urllib.request
from types import TracebackType

_USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} (\S+)$", re.MULTILINE)
_INTERVAL_SECONDS = 0.05


def parse_usage(metrics: str) -> float:
    """Return the share of the KV cache that is in use, 0 to 1, from the text of /metrics."""
    match = _USAGE.search(metrics)
    if match is None:
        raise ValueError("the server's /metrics has no vllm:kv_cache_usage_perc")
    return float(match.group(1))


class PeakUsage:
    """Samples the KV cache in the background while the `with` block runs.

    What it finds can only be too low: a peak between two samples is missed.
    """

    def __init__(self, server_url: str, *, num_blocks: int) -> None:
        self._url = f"{server_url}/metrics"
        # One block is a placeholder that is never handed out, and not counted as a part of the
        # cache by the metric.
        self._usable_blocks = num_blocks - 1
        self._peak = 0.0
        self._samples = 0
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def blocks(self) -> int:
        """The most blocks that were seen in use at once."""
        return round(self._peak * self._usable_blocks)

    @property
    def samples(self) -> int:
        """How many times the metric was read."""
        return self._samples

    def __enter__(self) -> PeakUsage:
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
            while not self._done.wait(_INTERVAL_SECONDS):
                with urllib.request.urlopen(self._url, timeout=30) as response:
                    usage = parse_usage(response.read().decode())
                self._peak = max(self._peak, usage)
                self._samples += 1
        except (OSError, ValueError) as problem:
            # Raised in the thread that waits for the result, by __exit__.
            self._error = problem
