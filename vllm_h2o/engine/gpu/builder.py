"""Metadata builders for GPUs: kernels see only live blocks, in buffers that full CUDA graphs can rely on."""

from typing import Any

import torch

from vllm_h2o.engine.compat import AttentionSpec, CommonAttentionMetadata, VllmConfig
from vllm_h2o.engine.gpu.compat import (
    AttentionCGSupport,
    FlashAttentionMetadataBuilder,
    TritonAttentionMetadataBuilder,
)
from vllm_h2o.engine.gpu.steps import LiveSteps
from vllm_h2o.engine.memory import allocate_rings, num_ring_queries
from vllm_h2o.engine.spec import H2OSpec

WORK_ATTRIBUTE = "kv_policy_work"
"""Attribute of the wrapped backend's metadata that carries the ``LayerWork`` to the layers."""

_Builder: Any = object
"""Stands for the wrapped builder, which comes behind ``LiveBlocksBuilder`` among the bases."""


class LiveBlocksBuilder(_Builder):
    """vLLM's builder; groups whose spec isn't ours (sliding window) pass through it untouched.

    Attributes:
        steps: None in such groups.
    """

    # A table of other blocks has another gap.
    supports_update_block_table = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **kwargs: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
        self.steps: LiveSteps | None = None
        self._capturing = False
        if isinstance(kv_cache_spec, H2OSpec):
            policy = kv_cache_spec.policy
            num_queries = num_ring_queries(policy, vllm_config.scheduler_config.max_num_seqs)
            allocate_rings(vllm_config, layer_names, num_queries, device)
            self.steps = LiveSteps(policy, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> Any:
        """Full graphs for decode steps only: chunks are scored by layers that run in Python."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        decode_only = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        if isinstance(kv_cache_spec, H2OSpec) and support.value > decode_only.value:
            return decode_only
        return support

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's metadata for the live blocks, with what the layers have to do attached."""
        if self.steps is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        begin = self.steps.capture if self._capturing else self.steps.start
        live, work = begin(common_attn_metadata)
        metadata = super().build(0, live, fast_build)
        setattr(metadata, WORK_ATTRIBUTE, work)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As the wrapped builder does it, which comes back to ``build``."""
        self._capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capturing = False


class H2OFlashAttentionMetadataBuilder(LiveBlocksBuilder, FlashAttentionMetadataBuilder):
    """``FLASH_ATTN``'s builder."""


class H2OTritonAttentionMetadataBuilder(LiveBlocksBuilder, TritonAttentionMetadataBuilder):
    """``TRITON_ATTN``'s builder."""
