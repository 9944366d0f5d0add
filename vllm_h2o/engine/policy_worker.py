"""What workers under a KV policy have in common: switch it on, size memory for it, check the model."""

from functools import cached_property
from typing import Any, ClassVar, NoReturn

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import backend
from vllm_h2o.engine.compat import KVCacheSpec, init_logger
from vllm_h2o.engine.memory import num_ring_queries, ring_bytes, scratch_bytes
from vllm_h2o.engine.refusals import refuse_model, refuse_small_memory
from vllm_h2o.engine.seams import Seam, check_seams
from vllm_h2o.engine.spec import H2OSpec, evicting
from vllm_h2o.errors import ConfigError
from vllm_h2o.kernels import create as create_kernels
from vllm_h2o.kernels.base import Kernels

logger = init_logger("vllm.h2o.worker")

_Worker: Any = object
"""Stands for vLLM's worker of the platform, which comes behind ``PolicyWorker`` among the bases."""


class PolicyWorker(_Worker):
    """vLLM's worker under a KV policy; chosen through ``worker_cls``, so other engines never see it."""

    seams: ClassVar[tuple[Seam, ...]]

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
        assert policy is not None, "this worker is only for engines with a KV policy"
        check_seams(self.seams)
        self.kv_policy = policy
        backend.activate()
        super().__init__(vllm_config, *args, **kwargs)

    @cached_property
    def kernels(self) -> Kernels:
        return create_kernels(self.kv_policy)

    @staticmethod
    def num_ring_slots(max_num_seqs: int) -> int:
        """Requests whose decode queries a layer keeps."""
        raise NotImplementedError

    def scratch_bytes(self, layer_names: list[str]) -> int:
        """Bytes beside the rings and the cache that the work on these layers takes at most."""
        return scratch_bytes(self.vllm_config, self.kernels, layer_names)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and refuse, all reasons at once, what eviction can't serve."""
        super().load_model(*args, **kwargs)
        refuse_model(self.vllm_config, self.kv_policy)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs with the full-attention ones replaced by ours."""
        specs = super().get_kv_cache_spec()
        return {name: evicting(spec, self.kv_policy) for name, spec in specs.items()}

    def determine_available_memory(self) -> int:
        """vLLM's figure less the memory of the kept queries, so that both fit what the user granted."""
        available: int = super().determine_available_memory()
        evicted = {n: s for n, s in self.get_kv_cache_spec().items() if isinstance(s, H2OSpec)}
        if not evicted:  # nothing can grow past the budget, or a pipeline stage without such layers
            self._log_policy(evicted, 0)
            return available
        slots = self.num_ring_slots(self.vllm_config.scheduler_config.max_num_seqs)
        rings = ring_bytes(self.vllm_config, num_ring_queries(self.kv_policy, slots), list(evicted))
        self._log_policy(evicted, rings)
        scratch = self.scratch_bytes(list(evicted))
        # Without kept queries it is the cache that is too small, as refuse_small_memory says.
        if rings and rings + scratch >= available:
            self._refuse_memory(rings, scratch, available)
        left = available - rings - scratch
        specs = self.get_kv_cache_spec().values()
        needed = sum(spec.max_memory_usage_bytes(self.vllm_config) for spec in specs)
        refuse_small_memory(self.vllm_config, self.kv_policy, needed, left)
        return left

    def kv_policy_requests(self) -> list[tuple[int, int]]:
        """Live and evicted tokens of each request in the runner's batch; empty where it isn't known."""
        return []

    def _refuse_memory(self, rings: int, scratch: int, available: int) -> NoReturn:
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        # With half of the memory, so that the other half is left for the cache itself.
        slots = (available // 2 - scratch) * self.num_ring_slots(max_num_seqs) // rings
        fitting = slots - self.num_ring_slots(0)
        raise ConfigError(
            "--max-num-seqs", max_num_seqs,
            f"kept queries need {rings / 2**20:.0f} MiB and scoring {scratch / 2**20:.0f} MiB of the KV "
            f"cache's memory, which is {available / 2**20:.0f} MiB",
            (f"Give at most {fitting}, or" if fitting > 0 else "Give")
            + " the KV cache more memory (--kv-cache-memory-bytes)",
        )  # fmt: skip

    def _log_policy(self, evicting_layers: dict[str, H2OSpec], rings: int) -> None:
        policy = self.kv_policy
        if not self.is_driver_worker:
            return
        if not policy.evicts:
            logger.info(
                "KV policy %s: budget %d tokens covers max_model_len %d, so nothing is evicted or scored",
                policy.name, policy.budget_tokens, policy.max_model_len,
            )  # fmt: skip
            return
        logger.info(
            "KV policy %s: budget %d tokens (%d while a prompt is read) of max_model_len %d, pinned %d "
            "(%d blocks), block size %d, granularity %s, %s; %d evicting layers, scores take %d bytes "
            "per block inside the KV cache, kept queries %.1f MiB beside it; %s kernels",
            policy.name, policy.budget_tokens, policy.prompt_budget_tokens or policy.budget_tokens,
            policy.max_model_len, policy.pinned_tokens, policy.pinned_blocks, policy.block_size,
            policy.granularity, policy.describe_ranks(), len(evicting_layers),
            sum(spec.side_bytes for spec in evicting_layers.values()), rings / 2**20, self.kernels.name,
        )  # fmt: skip
