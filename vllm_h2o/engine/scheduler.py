"""vLLM's scheduler, which tells the managers the limits of single requests and reports what the policy did.

It schedules nothing by itself; what is freed or reused is up to the manager (``vllm_h2o.engine.manager``).
"""

from functools import cached_property
from typing import Any

# Not in compat: only the engine's own process needs them.
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_h2o.config import CONFIG_KEY, KVPolicyConfig
from vllm_h2o.engine.compat import current_platform, init_logger
from vllm_h2o.engine.manager import H2OManager
from vllm_h2o.engine.seams import SCHEDULER_SEAMS, check_seams
from vllm_h2o.engine.spec import H2OSpec
from vllm_h2o.prompt_reuse import PromptReuse
from vllm_h2o.request_limits import REPORT, RequestLimits
from vllm_h2o.usage import SECONDS_ATTRIBUTE, CacheUsage, UsageReport

logger = init_logger("vllm.h2o.scheduler")

_Scheduler: Any = object
"""Stands for one of vLLM's two schedulers, which comes behind ``ServesPolicy`` among the bases."""


class ServesPolicy(_Scheduler):
    """Puts a ``UsageReport`` into each step's statistics, and one of a request into its answer if asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_seams(SCHEDULER_SEAMS)
        super().__init__(*args, **kwargs)
        policy = KVPolicyConfig.from_additional_config(self.vllm_config.additional_config)
        assert policy is not None, "this scheduler is only for engines with a KV policy"
        self.policy = policy
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._managers = [manager for manager in managers if isinstance(manager, H2OManager)]
        self._reported = CacheUsage()
        self._seconds = (0.0, 0.0)
        # Where other groups have their own idea of a hit, only pinned blocks are shared; on GPUs, too, where
        # tokens move at the beginning of the next step, when vLLM has made its copies.
        reuse = PromptReuse(policy)
        is_simple = len(managers) == len(self._managers) == 1 and current_platform.is_cpu()
        if is_simple and reuse.is_on:
            self._managers[0].reuse = reuse
            self._find_hit = self.kv_cache_manager.get_computed_blocks
            self.kv_cache_manager.get_computed_blocks = self._usable_hit

    def _usable_hit(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """In place of ``KVCacheManager.get_computed_blocks``: cut to what the request starts with."""
        hit, num_tokens, *rest = self._find_hit(request, *args, **kwargs)
        cache, (manager,) = self.kv_cache_manager, self._managers
        free = cache.block_pool.get_num_free_blocks() - cache.watermark_blocks
        (blocks,) = hit.blocks
        usable = manager.usable_hit_blocks(request, len(blocks), free)
        if usable < len(blocks):
            hit, num_tokens = cache.create_kv_cache_blocks((blocks[:usable],)), usable * manager.block_size
        return hit, num_tokens, *rest

    def add_request(self, request: Any) -> None:
        """As vLLM's; its limits hold from its first step to its end, through preemptions."""
        is_new = request.request_id not in self.requests  # else more input of a session
        super().add_request(request)
        # On GPUs workers keep to the policy's own, and front ends refuse others unless they were gone around.
        extra_args = _extra_args(request) if current_platform.is_cpu() else None
        for manager in self._managers if is_new else ():
            wrong = manager.requests.add(request.request_id, extra_args, request.num_prompt_tokens)
            if wrong is not None:
                logger.warning("A request came unchecked and gets the limits of the policy: %s", wrong)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        kv_params, ec_params = super()._free_request(request, *args, **kwargs)
        if kv_params is None and (_extra_args(request) or {}).get(REPORT):
            kv_params = {CONFIG_KEY: self._report_of(request)}
        for manager in self._managers:
            manager.requests.forget([request.request_id])
        return kv_params, ec_params

    def _report_of(self, request: Any) -> dict[str, int]:
        limits = RequestLimits.of_policy(self.policy)
        if self._managers:
            limits = self._managers[0].requests.of(request.request_id)
        computed = request.num_tokens - 1  # the last one is an answer only
        evicted = limits.evicted_blocks(computed, self.policy.block_size) * self.policy.block_size
        return {
            "evicted_tokens": evicted,
            "live_tokens": computed - evicted,
            "budget_tokens": limits.budget_tokens,
        }

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """As vLLM's."""
        self._seconds = getattr(model_runner_output, SECONDS_ATTRIBUTE, (0.0, 0.0))
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics and our report; None where statistics are off."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self._managers:
            stats.num_kv_fetch_reqs_by_stage.update(self._report().to_items())
        return stats

    def _report(self) -> UsageReport:
        # A request has the same history in all groups (vLLM makes several where a model mixes layers).
        usage, reported = self._managers[0].usage, self._reported
        evicted_tokens = usage.evicted_tokens - reported.evicted_tokens
        requests_evicted = usage.requests_evicted - reported.requests_evicted
        reported.evicted_tokens, reported.requests_evicted = usage.evicted_tokens, usage.requests_evicted
        (scoring, compaction), self._seconds = self._seconds, (0.0, 0.0)
        return UsageReport(
            evicted_blocks=evicted_tokens // self._managers[0].block_size * len(self._managers),
            evicted_tokens=evicted_tokens,
            requests_evicted=requests_evicted,
            requests_over_budget=usage.requests_over_budget,
            live_tokens=usage.live_tokens,
            logical_tokens=usage.logical_tokens,
            score_memory_bytes=self._score_memory_bytes,
            scoring_us=round(scoring * 1e6),
            compaction_us=round(compaction * 1e6),
        )

    @cached_property
    def _score_memory_bytes(self) -> int:
        groups = self.kv_cache_config.kv_cache_groups
        per_block = sum(
            group.kv_cache_spec.side_bytes * len(group.layer_names)
            for group in groups
            if isinstance(group.kv_cache_spec, H2OSpec)
        )
        return per_block * self.kv_cache_config.num_blocks


def _extra_args(request: Any) -> dict[str, Any] | None:
    params = request.sampling_params
    return None if params is None else params.extra_args


class H2OScheduler(ServesPolicy, Scheduler):
    """For engines that wait for each step."""


class H2OAsyncScheduler(ServesPolicy, AsyncScheduler):
    """For engines that schedule a step while the last one runs."""
