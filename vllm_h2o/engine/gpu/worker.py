"""GPU worker under a KV policy."""

from functools import cached_property
from typing import Any

# Not in compat: with it comes all of vLLM that runs on GPUs, which only a worker process needs.
from vllm.v1.worker.gpu_worker import Worker

from vllm_h2o.engine.compat import KVCacheSpec
from vllm_h2o.engine.memory import num_ring_queries, scratch_bytes
from vllm_h2o.engine.policy_worker import PolicyWorker
from vllm_h2o.engine.seams import GPU_SEAMS
from vllm_h2o.errors import ConfigError
from vllm_h2o.kernels import create as create_kernels
from vllm_h2o.kernels.base import Kernels

_INT32_BYTES = 4


class H2OGPUWorker(PolicyWorker, Worker):
    """vLLM's GPU worker under a KV policy."""

    seams = GPU_SEAMS

    @cached_property
    def kernels(self) -> Kernels:
        return create_kernels(self.kv_policy, self.device)

    @staticmethod
    def num_ring_slots(max_num_seqs: int) -> int:
        """One per request that the runner has a number for."""
        return max_num_seqs

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As ``PolicyWorker`` says.

        Raises:
            ConfigError: the attention backend has picked blocks of another size than the policy's.
        """
        block_size = self.vllm_config.cache_config.block_size
        if self.kv_policy.evicts and block_size != self.kv_policy.block_size:
            raise ConfigError(
                "--block-size", self.kv_policy.block_size,
                f"the attention backend of this model wants blocks of {block_size} tokens on this GPU",
                f"Give --block-size {block_size}",
            )  # fmt: skip
        return super().get_kv_cache_spec()

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM's."""
        # Blocks would be zeroed when they change hands, before the last step's tokens have moved out of them.
        assert not kv_cache_config.needs_kv_cache_zeroing
        super().initialize_from_config(kv_cache_config)

    def scratch_bytes(self, layer_names: list[str]) -> int:
        """Scoring and dropping in all layers at once, and the buffers of live tables, lengths and slots."""
        limits = self.vllm_config.scheduler_config
        table_width = -(-self.kv_policy.max_model_len // self.kv_policy.block_size)
        buffers = limits.max_num_seqs * (table_width + 1) + limits.max_num_batched_tokens
        # One set per group of layers, and layers of one spec are nearly always one group.
        num_groups = len({self.get_kv_cache_spec()[name] for name in layer_names})
        work = scratch_bytes(
            self.vllm_config,
            self.kernels,
            layer_names,
            num_layers=len(layer_names),
            num_ring_queries=num_ring_queries(self.kv_policy, limits.max_num_seqs),
        )
        return work + num_groups * buffers * _INT32_BYTES
