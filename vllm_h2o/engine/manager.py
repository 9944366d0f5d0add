"""Block manager of evicting layers: frees the blocks that the rule says are gone.

The scheduler calls ``remove_skipped_blocks`` before it allocates for a step, with the tokens whose steps
are settled. Those are never ahead of what a worker has compacted, which is why asynchronous scheduling is
safe: at worst a block is freed a step later than it could be.
"""

from collections.abc import Sequence
from typing import Any

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import (
    FullAttentionManager,
    KVCacheBlock,
    Request,
)
from vllm_h2o.errors import ConfigError
from vllm_h2o.prompt_reuse import PromptReuse
from vllm_h2o.request_limits import RequestTable
from vllm_h2o.usage import CacheUsage


class H2OManager(FullAttentionManager):
    """``FullAttentionManager`` with a gap behind the pinned blocks; only blocks that don't change are cached.

    Attributes:
        requests: those with limits of their own; the scheduler keeps it up to date.
        usage: what its requests hold and have lost.
        reuse: what stays in the prefix cache beyond the pinned blocks; None: nothing. The scheduler sets it.
    """

    max_admission_blocks_per_request: int | None

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.policy: KVPolicyConfig = kv_cache_spec.policy
        self.requests = RequestTable(self.policy)
        self.usage = CacheUsage()
        self.reuse: PromptReuse | None = None
        # What ``cache_blocks`` was told of each request that has lost nothing yet.
        self._whole: dict[str, tuple[Request, tuple[Any, ...], dict[str, Any]]] = {}
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
        if evicted:
            self._offer(request_id, processed_computed_tokens)
        self._remove_blocks_in_range(request_id, first, first + evicted)
        if request_id in self.req_to_blocks:  # else it waits, and what the cache has of it isn't its own yet
            self.usage.update(request_id, processed_computed_tokens, evicted * self.policy.block_size)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As vLLM's: the request ended or is preempted."""
        if request_id in self._whole:
            request, _, _ = self._whole[request_id]
            self._offer(request_id, request.num_computed_tokens - request.num_in_flight_tokens)
        self.usage.forget(request_id)
        return super().pop_blocks_for_free(request_id)

    def cache_blocks(self, request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Offer the pinned blocks to other requests; others only when they are given back (``_offer``)."""
        super().cache_blocks(request, min(num_tokens, self.policy.pinned_tokens), *args, **kwargs)
        is_reading = request.num_computed_tokens < request.num_prompt_tokens
        if self.reuse is not None and is_reading:
            self._whole[request.request_id] = request, args, kwargs

    def _offer(self, request_id: str, settled_tokens: int) -> None:
        """Put blocks into the prefix cache that the request is about to give back for the first time.

        Not earlier: copies are made before their step computes anything, so those of blocks that are only
        being computed would be copies of nothing.
        """
        if self.reuse is None or request_id not in self._whole:
            return
        request, args, kwargs = self._whole.pop(request_id)
        offered = self.reuse.offered_tokens(
            self.requests.of(request_id),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
        )
        super().cache_blocks(request, min(settled_tokens, offered), *args, **kwargs)

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        *args: Any,
        **kwargs: Any,
    ) -> int:
        """As vLLM's, with room for the copies of ``add_local_computed_blocks``."""
        needed: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, *args, **kwargs
        )
        return needed + max(len(new_computed_blocks) - self.policy.pinned_blocks, 0)

    def add_local_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """As vLLM's; of blocks beyond the pinned ones the request gets copies that are its own."""
        super().add_local_computed_blocks(request_id, *args, **kwargs)
        blocks = self.req_to_blocks[request_id]
        taken = range(self.policy.pinned_blocks, len(blocks))
        for index, copy in zip(taken, self.block_pool.get_new_blocks(len(taken)), strict=True):
            self._apply_cow(request_id, index, blocks[index], copy)

    def usable_hit_blocks(self, request: Request, num_hit_blocks: int, num_free_blocks: int) -> int:
        """How many of the blocks that the prefix cache has of a request it starts with.

        Args:
            num_hit_blocks: what was found.
            num_free_blocks: what the pool has to spare. Copies come beside what they are copied from, and a
                request must not wait for room that it needs only because of them.
        """
        if self.reuse is None:
            return num_hit_blocks
        usable_tokens = self.reuse.usable_tokens(
            self.requests.of(request.request_id),
            num_prompt_tokens=request.num_prompt_tokens,
            most_tokens=min(request.num_prompt_tokens + request.max_tokens, self.policy.max_model_len),
        )
        needed, most = -(-request.num_tokens // self.block_size), self.max_admission_blocks_per_request
        assert most is not None
        pinned = self.policy.pinned_blocks
        room = pinned + max(num_free_blocks - min(needed, most), 0)
        return min(num_hit_blocks, usable_tokens // self.block_size, room)
