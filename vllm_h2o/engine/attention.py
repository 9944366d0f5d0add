"""Attention of an evicting layer: vLLM's kernel, then scores, then compaction."""

from typing import Any

import torch

from vllm_h2o.engine.builder import PLAN_ATTRIBUTE, StepWork
from vllm_h2o.engine.compat import CPUAttentionBackendImpl, policy_of_current_config
from vllm_h2o.kernels.base import AttentionShape, LayerState
from vllm_h2o.layout import PagedLayer


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
        self._state: tuple[int, LayerState] | None = None

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
        work: StepWork | None = getattr(attn_metadata, PLAN_ATTRIBUTE, None)
        if work is not None:
            work.run(self._layer_state(layer, kv_cache), query)
        return result

    def _layer_state(self, layer: Any, kv_cache: torch.Tensor) -> LayerState:
        """Views of the layer's memory, made anew only when vLLM hands over other memory."""
        if self._state is None or self._state[0] != kv_cache.data_ptr():
            assert self._policy is not None
            state = LayerState(
                name=layer.layer_name,
                cache=PagedLayer.from_cpu_cache(
                    kv_cache, isa=layer.isa, positions=self._policy.tracks_positions
                ),
                ring=self.query_ring,
                shape=AttentionShape(self.scale, self.logits_soft_cap or 0.0, self.sinks),
            )
            self._state = (kv_cache.data_ptr(), state)
        return self._state[1]
