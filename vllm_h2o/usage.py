"""What requests hold and what they have lost, in numbers that an operator watches. It knows no vLLM."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Self


class CacheUsage:
    """The requests of one KV cache group, kept up to date in constant time per request and step.

    Attributes:
        logical_tokens: tokens whose KV was computed, of the requests that run now.
        live_tokens: those of them that are still held.
        requests_over_budget: requests that run now and have lost tokens.
        evicted_tokens, requests_evicted: totals since the start; a request that is preempted and computed
            again counts again.
    """

    def __init__(self) -> None:
        self.logical_tokens = 0
        self.live_tokens = 0
        self.requests_over_budget = 0
        self.evicted_tokens = 0
        self.requests_evicted = 0
        self._requests: dict[str, tuple[int, int]] = {}

    def update(self, request_id: str, num_computed_tokens: int, num_evicted_tokens: int) -> None:
        """Note where a request is now, in tokens since its beginning."""
        computed, evicted = self._requests.get(request_id, (0, 0))
        if computed == num_computed_tokens and evicted == num_evicted_tokens:
            return
        self._requests[request_id] = num_computed_tokens, num_evicted_tokens
        newly_evicted = num_evicted_tokens - evicted
        self.logical_tokens += num_computed_tokens - computed
        self.live_tokens += num_computed_tokens - computed - newly_evicted
        if newly_evicted > 0:
            self.evicted_tokens += newly_evicted
            if not evicted:
                self.requests_evicted += 1
                self.requests_over_budget += 1

    def forget(self, request_id: str) -> None:
        """Note that a request holds nothing any more; one that never held anything is fine."""
        computed, evicted = self._requests.pop(request_id, (0, 0))
        self.logical_tokens -= computed
        self.live_tokens -= computed - evicted
        self.requests_over_budget -= bool(evicted)


SECONDS_ATTRIBUTE = "kv_policy_seconds"
"""Attribute of a step's output: what layers spent on scoring and on compaction, from worker to scheduler."""

_PREFIX = "kv_policy."


@dataclass(kw_only=True)
class UsageReport:
    """What a scheduler tells its front end after a step, all of them whole numbers.

    Attributes:
        evicted_blocks, evicted_tokens, requests_evicted: since the last report.
        requests_over_budget, live_tokens, logical_tokens: now, as in ``CacheUsage``.
        score_memory_bytes: scores inside the KV cache of one rank.
        scoring_us, compaction_us: of this step and all layers, microseconds on the rank that reports; 0
            where nothing was due or nothing can be measured (GPUs).
    """

    evicted_blocks: int = 0
    evicted_tokens: int = 0
    requests_evicted: int = 0
    requests_over_budget: int = 0
    live_tokens: int = 0
    logical_tokens: int = 0
    score_memory_bytes: int = 0
    scoring_us: int = 0
    compaction_us: int = 0

    def to_items(self) -> Iterator[tuple[str, int]]:
        """Names with a prefix of ours, and values: for a mapping that belongs to others."""
        for field in fields(self):
            yield _PREFIX + field.name, getattr(self, field.name)

    @classmethod
    def take_from(cls, mapping: dict[str, int]) -> Self | None:
        """Take the items out of the mapping again; None if there are none."""
        names = [field.name for field in fields(cls) if _PREFIX + field.name in mapping]
        return cls(**{name: mapping.pop(_PREFIX + name) for name in names}) if names else None
