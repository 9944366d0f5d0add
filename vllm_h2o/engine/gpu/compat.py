"""Names of vLLM that only GPUs need; the rest is in ``vllm_h2o.engine.compat``.

Importing these takes a second that no other process has to spend.
"""

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = [
    "AttentionCGSupport",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadataBuilder",
    "KVCacheLayout",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadataBuilder",
]
