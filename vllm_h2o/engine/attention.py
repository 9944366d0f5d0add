"""Attention of an evicting layer: vLLM's kernel, then scores, then compaction."""

from typing import Any

import torch

from vllm_h2o.compaction import compact
from vllm_h2o.engine.builder import PLAN_ATTRIBUTE
from vllm_h2o.engine.compat import CPUAttentionBackendImpl, policy_of_current_config
from vllm_h2o.layout import PagedLayer
from vllm_h2o.scoring import AttentionShape, score_decode, score_prefill
from vllm_h2o.step_plan import StepPlan


class H2OCPUAttentionImpl(CPUAttentionBackendImpl):
    """vLLM's CPU attention; what follows the kernel is laid out in the step's plan.

    Attributes:
        query_ring: ``[num_slots * block_size, num_heads, head_size]``, set by
            ``vllm_h2o.engine.memory`` for evicting layers.
    """

    query_ring: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._policy = policy_of_current_config()
        self._views: tuple[int, PagedLayer] | None = None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Same contract as ``CPUAttentionBackendImpl.forward``; changes scores and, when due, the cache."""
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        plan: StepPlan | None = getattr(attn_metadata, PLAN_ATTRIBUTE, None)
        if plan is not None:
            self._after_attention(layer, query, kv_cache, plan)
        return result

    def _after_attention(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, plan: StepPlan
    ) -> None:
        if plan.append_tokens is not None:
            self.query_ring[plan.append_slots] = query[plan.append_tokens]
        if plan.started_blocks is None and not (plan.flushes or plan.chunks or plan.compaction):
            return
        cache = self._cache_views(kv_cache)
        if plan.started_blocks is not None:
            assert plan.started_positions is not None
            cache.start_blocks(plan.started_blocks, plan.started_positions)
        shape = AttentionShape(self.scale, self.logits_soft_cap, self.sinks)
        ring = self.query_ring.unflatten(0, (-1, cache.block_size))
        for flush in plan.flushes:
            score_decode(cache, ring, flush, shape)
        for chunk in plan.chunks:
            score_prefill(cache, query, chunk, shape)
        if plan.compaction is not None:
            compact(cache, plan.compaction)
            if plan.trace is not None:
                plan.trace.add_compaction(layer.layer_name, cache, plan.compaction, plan.trace_steps)

    def _cache_views(self, kv_cache: torch.Tensor) -> PagedLayer:
        """Views of the cache, made anew only when vLLM hands over other memory."""
        if self._views is None or self._views[0] != kv_cache.data_ptr():
            assert self._policy is not None
            views = PagedLayer.from_cpu_cache(kv_cache, positions=self._policy.tracks_positions)
            self._views = (kv_cache.data_ptr(), views)
        return self._views[1]
