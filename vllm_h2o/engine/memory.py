"""Memory that eviction needs beside the KV cache, taken off the cache's share.

Kept decode queries: one ring per evicting layer. Scratch of scoring and dropping: as the kernels say.
"""

import numpy as np
import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import Attention, VllmConfig, get_layers_from_vllm_config
from vllm_h2o.kernels.base import Kernels, LayerSizes


def num_ring_queries(policy: KVPolicyConfig, num_slots: int) -> int:
    """Queries that a layer's ring of ``num_slots`` holds."""
    return num_slots * policy.block_size if policy.scores_attention else 0


def ring_bytes(vllm_config: VllmConfig, num_queries: int, layer_names: list[str]) -> int:
    """Bytes of the rings of ``layer_names`` on this worker, for ``num_queries`` each."""
    layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    return sum(
        num_queries * layer.num_heads * layer.head_size * _dtype(vllm_config).itemsize
        for layer in layers.values()
    )


def scratch_bytes(
    vllm_config: VllmConfig,
    kernels: Kernels,
    layer_names: list[str],
    *,
    num_layers: int = 1,
    num_ring_queries: int = 0,
) -> int:
    """Bytes that the work after a layer's attention takes at most while it runs.

    Args:
        num_layers, num_ring_queries: as in ``LayerSizes``.
    """
    layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
    element_bytes = _dtype(vllm_config).itemsize
    sizes = (
        LayerSizes(
            layer.num_heads, layer.num_kv_heads, layer.head_size, element_bytes, num_layers, num_ring_queries
        )
        for layer in layers.values()
    )
    return max(map(kernels.scratch_bytes, sizes))


def allocate_rings(
    vllm_config: VllmConfig, layer_names: list[str], num_queries: int, device: torch.device
) -> None:
    """Give each layer its ring ``[num_queries, num_heads, head_size]``, zeroed, in the model's dtype.

    On CPU the pages of a slot become resident only when it is first used.
    """
    dtype = _dtype(vllm_config)
    for layer in get_layers_from_vllm_config(vllm_config, Attention, layer_names).values():
        shape = (num_queries, layer.num_heads, layer.head_size)
        if device.type != "cpu":
            layer.impl.query_ring = torch.zeros(shape, dtype=dtype, device=device)
            continue
        layer.impl.query_ring = torch.empty(shape, dtype=dtype)
        if num_queries:
            zeros = np.zeros(layer.impl.query_ring.nbytes, dtype=np.uint8)
            layer.impl.query_ring = torch.from_numpy(zeros).view(dtype).view(shape)


def _dtype(vllm_config: VllmConfig) -> torch.dtype:
    dtype: torch.dtype = vllm_config.model_config.dtype
    return dtype
