"""Block manager of evicting layers: frees the blocks that the rule says are gone.

The scheduler calls ``remove_skipped_blocks`` before it allocates for a step, with the tokens whose steps
are settled. Those are never ahead of what a worker has compacted, which is why asynchronous scheduling is
safe: at worst a block is freed a step later than it could be.
"""

from typing import Any

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import (
    BlockPool,
    FullAttentionManager,
    KVCacheBlock,
    KVCacheSpec,
    Request,
)
from vllm_h2o.errors import ConfigError
from vllm_h2o.request_limits import RequestTable
from vllm_h2o.usage import CacheUsage


class H2OManager(FullAttentionManager):
    """``FullAttentionManager`` with a gap behind the pinned blocks; only pinned blocks are ever cached.

    Attributes:
        requests: those with limits of their own; the scheduler keeps it up to date.
        usage: what its requests hold and have lost.
    """

    max_admission_blocks_per_request: int | None

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.policy: KVPolicyConfig = kv_cache_spec.policy
        self.requests = RequestTable(self.policy)
        self.usage = CacheUsage()
        if kv_cache_spec.block_size != self.policy.block_size:
            raise ConfigError(
                "--block-size", self.policy.block_size,
                f"vLLM scaled it to {kv_cache_spec.block_size} to make the pages of all layers equal",
                "Serve this model without --kv-policy",
            )  # fmt: skip
        # vLLM passes an admission cap only to managers of its own recycling specs, by isinstance; without
        # one a prompt longer than the pool would never be admitted.
        if self.max_admission_blocks_per_request is None:
            self.max_admission_blocks_per_request = self.policy.max_blocks_per_request

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free blocks ``[s, s + evicted_blocks(processed_computed_tokens))`` of the request."""
        limits = self.requests.of(request_id)
        evicted = limits.evicted_blocks(processed_computed_tokens, self.policy.block_size)
        first = limits.pinned_blocks
        self._remove_blocks_in_range(request_id, first, first + evicted)
        self.usage.update(request_id, processed_computed_tokens, evicted * self.policy.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As vLLM's: the request ended or is preempted."""
        self.usage.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer at most the pinned blocks to other requests: all others change when tokens are dropped."""
        super().cache_blocks(request, min(num_tokens, self.policy.pinned_tokens), *args, **kwargs)

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Hits end at the pinned blocks, the only ones that ``cache_blocks`` offers."""
        pinned_tokens = kv_cache_spec.policy.pinned_tokens
        return super().find_longest_cache_hit(
            block_hashes,
            min(max_length, pinned_tokens),
            kv_cache_group_ids,
            block_pool,
            kv_cache_spec,
            *args,
            **kwargs,
        )
