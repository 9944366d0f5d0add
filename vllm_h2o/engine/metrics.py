"""Prometheus metrics of the policy on vLLM's own ``/metrics``, and a line in its periodic log.

The scheduler's report (``vllm_h2o.engine.scheduler``) comes to the front end inside vLLM's statistics: in a
mapping of counts that vLLM reads by fixed names only, because there is no place for those of plugins. It goes
to one front end where there are several, so that counters add up. This logger is the first to see it and
takes it out again.

Not a plugin of the group ``vllm.stat_logger_plugins``: one that is merely installed switches statistics on.
"""

import functools
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase, StatLoggerManager

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import init_logger
from vllm_h2o.engine.seams import METRICS_SEAMS, check_seams
from vllm_h2o.usage import UsageReport

logger = init_logger("vllm.h2o.metrics")

PREFIX = "vllm:kv_policy_"
REFUSED = PREFIX + "refused_requests"
_MARK = "__vllm_h2o__"
_LABELS = ("model_name", "engine")

COUNTERS = {
    "evicted_blocks": "KV cache blocks that requests gave back while they ran, because of the budget.",
    "evicted_tokens": "Tokens whose KV was dropped because of the budget.",
    "requests_evicted": "Requests that grew over the budget.",
}
GAUGES = {
    "requests_over_budget": "Requests that run now and have lost tokens.",
    "live_tokens": "Tokens whose KV the running requests hold.",
    "logical_tokens": "Tokens that the running requests have computed; without a policy all would be held.",
    "score_memory_bytes": "Scores inside the KV cache, on one rank.",
}
HISTOGRAMS = {
    "scoring_us": ("scoring_seconds", "Time that scoring took in a step in which it was due, all layers."),
    "compaction_us": ("compaction_seconds", "Time that dropping tokens took in a step that did, all layers."),
}
_BUCKETS_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


_refused_requests: list[Any] = []
"""The counter of this process, once there is one: requests are refused before they belong to an engine."""


def count_refused_request() -> None:
    for counter in _refused_requests:
        counter.inc()


def install() -> None:
    """Have vLLM's managers of statistics use our logger where a policy is active; idempotent."""
    if hasattr(StatLoggerManager.__init__, _MARK):
        return
    check_seams(METRICS_SEAMS)
    original = StatLoggerManager.__init__

    @functools.wraps(original)
    def __init__(
        self: Any,
        vllm_config: Any,
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: list[Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if KVPolicyConfig.from_additional_config(vllm_config.additional_config) is not None:
            custom_stat_loggers = [KVPolicyStatLogger, *(custom_stat_loggers or [])]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *args, **kwargs)

    setattr(__init__, _MARK, True)
    StatLoggerManager.__init__ = __init__


class KVPolicyStatLogger(AggregateStatLoggerBase):
    """Takes the reports of all engines of a front end.

    Attributes:
        latest: per engine its last report.
    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
        assert policy is not None
        self.policy = policy
        self.latest: dict[int, UsageReport] = {}
        self._model_name = vllm_config.model_config.served_model_name
        self._engine_indexes = engine_indexes
        self._metrics: dict[str, Any] = {}
        self._evicted_since_log = 0

    def log_engine_initialized(self) -> None:
        """Make the metrics: before this vLLM's own logger removes all that are called ``vllm:``."""
        info = {"policy": self.policy.name, "budget_tokens": str(self.policy.budget_tokens)}
        info |= {"pinned_tokens": str(self.policy.pinned_tokens), "granularity": self.policy.granularity}
        about = _gauge("info", "The policy that is served, as labels.", (*_LABELS, *info))
        made: dict[str, Any] = {name: _counter(name, text) for name, text in COUNTERS.items()}
        made |= {name: _gauge(name, text) for name, text in GAUGES.items()}
        for name, (seconds, text) in HISTOGRAMS.items():
            made[name] = Histogram(PREFIX + seconds, text, _LABELS, buckets=_BUCKETS_SECONDS)
        for engine in self._engine_indexes:
            about.labels(self._model_name, str(engine), *info.values()).set(1)
            for metric in made.values():
                metric.labels(self._model_name, str(engine))  # so that it is there, at 0
        refused = Counter(REFUSED, "Requests that asked for limits that can't be.", ("model_name",))
        _refused_requests.clear()
        _refused_requests.append(refused.labels(self._model_name))
        self._metrics = made

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """One step of one engine."""
        report = scheduler_stats and UsageReport.take_from(scheduler_stats.num_kv_fetch_reqs_by_stage)
        if not report:
            return
        self.latest[engine_idx] = report
        self._evicted_since_log += report.evicted_tokens
        labels = (self._model_name, str(engine_idx))
        for name in COUNTERS:
            self._metrics[name].labels(*labels).inc(getattr(report, name))
        for name in GAUGES:
            self._metrics[name].labels(*labels).set(getattr(report, name))
        for name in HISTOGRAMS:
            if microseconds := getattr(report, name):
                self._metrics[name].labels(*labels).observe(microseconds / 1e6)

    def log(self) -> None:
        """One line where tokens were dropped since the last one; vLLM's own shows that it runs."""
        if not self._evicted_since_log:
            return
        live = sum(report.live_tokens for report in self.latest.values())
        logical = sum(report.logical_tokens for report in self.latest.values())
        over_budget = sum(report.requests_over_budget for report in self.latest.values())
        logger.info(
            "KV policy %s: %d tokens dropped since the last line; running requests hold %d of %d tokens, "
            "%d of them over budget",
            self.policy.name, self._evicted_since_log, live, logical, over_budget,
        )  # fmt: skip
        self._evicted_since_log = 0


def _counter(name: str, text: str) -> Counter:
    return Counter(PREFIX + name, text, _LABELS)


def _gauge(name: str, text: str, labels: tuple[str, ...] = _LABELS) -> Gauge:
    return Gauge(PREFIX + name, text, labels, multiprocess_mode="mostrecent")
