"""Memory that eviction needs beside the KV cache, taken off the cache's share.

Kept decode queries: one ring per evicting layer. Scratch of scoring one layer: as its kernels say.
"""

import numpy as np
import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import Attention, VllmConfig, get_layers_from_vllm_config
from vllm_h2o.kernels.base import Kernels, LayerSizes
from vllm_h2o.query_ring import num_ring_slots


def num_ring_queries(vllm_config: VllmConfig, policy: KVPolicyConfig) -> int:
    """Queries that a layer's ring holds."""
    if not policy.scores_attention:
        return 0
    return num_ring_slots(vllm_config.scheduler_config.max_num_seqs) * policy.block_size


def ring_bytes(vllm_config: VllmConfig, policy: KVPolicyConfig, layer_names: list[str]) -> int:
    """Bytes of the rings of ``layer_names`` on this worker."""
    num_queries = num_ring_queries(vllm_config, policy)
    layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    return sum(
        num_queries * layer.num_heads * layer.head_size * _dtype(vllm_config).itemsize
        for layer in layers.values()
    )


def scratch_bytes(vllm_config: VllmConfig, kernels: Kernels, layer_names: list[str]) -> int:
    """Bytes that the work after a layer's attention takes at most while it runs."""
    layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    element_bytes = _dtype(vllm_config).itemsize
    return max(
        kernels.scratch_bytes(LayerSizes(layer.num_heads, layer.num_kv_heads, layer.head_size, element_bytes))
        for layer in layers.values()
    )


def allocate_rings(vllm_config: VllmConfig, layer_names: list[str], num_queries: int) -> None:
    """Give each layer its ring ``[num_queries, num_heads, head_size]``, zeroed, in the model's dtype.

    On CPU the pages of a slot become resident only when it is first used.
    """
    dtype = _dtype(vllm_config)
    for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values():
        shape = (num_queries, layer.num_heads, layer.head_size)
        layer.impl.query_ring = torch.empty(shape, dtype=dtype)
        if num_queries:
            zeros = np.zeros(layer.impl.query_ring.nbytes, dtype=np.uint8)
            layer.impl.query_ring = torch.from_numpy(zeros).view(dtype).view(shape)


def _dtype(vllm_config: VllmConfig) -> torch.dtype:
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype
