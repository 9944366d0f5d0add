"""How the process of one run tells its figures: shared by all peers, standard library only."""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from peer_workload import Task


@dataclass(frozen=True)
class Phases:
    """One batch, or all requests of a peer that batches by itself.

    Attributes:
        prefill_s: seconds until every request has its first token.
        total_s: seconds until all tokens are there.
        prefill_output_tokens: output tokens that were there after ``prefill_s``.
        output_tokens: all of them.
    """

    prefill_s: float
    total_s: float
    prefill_output_tokens: int
    output_tokens: int


class Watch:
    """Reads the clock while a peer that batches by itself computes; seconds since it was made."""

    def __init__(self, requests: int) -> None:
        self.counts = [0] * requests
        self._prefill: tuple[float, int] | None = None
        self._started = time.perf_counter()

    def look(self) -> None:
        """Call it after every step, with ``counts`` brought up to date."""
        if self._prefill is None and min(self.counts) > 0:
            self._prefill = time.perf_counter() - self._started, sum(self.counts)

    def stop(self, output_tokens: int) -> Phases:
        """All requests are finished, with ``output_tokens`` each."""
        total_s = time.perf_counter() - self._started
        check_counts(self.counts, output_tokens)
        assert self._prefill is not None
        return Phases(self._prefill[0], total_s, self._prefill[1], sum(self.counts))


def check_counts(counts: list[int], output_tokens: int) -> None:
    """Refuse figures of requests that were cut short.

    Raises:
        RuntimeError: some request has another number of tokens.
    """
    if set(counts) != {output_tokens}:
        raise RuntimeError(f"requests have {counts} output tokens instead of {output_tokens} each")


def figures(phases: Iterable[Phases]) -> dict[str, float]:
    """Of batches that ran one after another: tokens per second, seconds, tokens."""
    parts = list(phases)
    prefill_s = sum(part.prefill_s for part in parts)
    total_s = sum(part.total_s for part in parts)
    output_tokens = sum(part.output_tokens for part in parts)
    decoded = output_tokens - sum(part.prefill_output_tokens for part in parts)
    return {
        "output_tokens_per_s": output_tokens / total_s,
        "prefill_s": prefill_s,
        "decode_tokens_per_s": decoded / (total_s - prefill_s),
        "total_s": total_s,
        "output_tokens": output_tokens,
    }


def peak_rss_bytes() -> int:
    """Most memory that this process had resident so far; other processes that it ran don't count."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main(
    measure: Callable[[Task], tuple[list[Phases], dict[str, Any]]], distributions: Iterable[str]
) -> None:
    """Read the task, run it, and print its figures as the last line.

    Args:
        measure: returns the phases, and what else is worth keeping.
        distributions: packages whose versions belong to the result.
    """
    task = Task.from_json(json.load(sys.stdin))
    phases, more = measure(task)
    line = {
        **figures(phases),
        "peak_rss_bytes": peak_rss_bytes(),
        "requests": task.requests,
        "batch": task.variant.batch,
        "threads": task.threads,
        **more,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in distributions},
        },
    }
    print(json.dumps(line), flush=True)
