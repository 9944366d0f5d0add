"""Attention of an evicting layer on a GPU: vLLM's kernel, then the queries it saw are kept and scored."""

from typing import Any

import torch

from vllm_h2o.engine.gpu.builder import WORK_ATTRIBUTE
from vllm_h2o.engine.gpu.compat import FlashAttentionImpl, TritonAttentionImpl
from vllm_h2o.engine.gpu.steps import LayerWork

_Impl: Any = object
"""Stands for the wrapped attention, which comes behind ``KeepsQueries`` among the bases."""


class KeepsQueries(_Impl):
    """vLLM's attention; what follows the kernel is laid out in the step's metadata.

    Attributes:
        query_ring: ``[max_num_seqs * block_size, num_heads, head_size]``, set by
            ``vllm_h2o.engine.memory`` for evicting layers.
    """

    query_ring: torch.Tensor

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
        """Same contract as that of the wrapped attention; without metadata (profiling) nothing follows."""
        result = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        work: LayerWork | None = getattr(attn_metadata, WORK_ATTRIBUTE, None)
        if work is not None:
            work.run(layer.layer_name, self.query_ring, query)
        return result


class H2OFlashAttentionImpl(KeepsQueries, FlashAttentionImpl):
    """``FLASH_ATTN``'s attention."""


class H2OTritonAttentionImpl(KeepsQueries, TritonAttentionImpl):
    """``TRITON_ATTN``'s attention."""
