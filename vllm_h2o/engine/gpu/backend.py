"""Attention backends for GPUs: vLLM's own with our metadata builders and our attention.

Those are imported on first use, as in ``vllm_h2o.engine.backend``, where these classes are registered.
"""

from typing import TYPE_CHECKING, Any

from vllm_h2o.engine.gpu.compat import FlashAttentionBackend, KVCacheLayout, TritonAttentionBackend

if TYPE_CHECKING:
    from vllm_h2o.engine.gpu.attention import H2OFlashAttentionImpl, H2OTritonAttentionImpl
    from vllm_h2o.engine.gpu.builder import (
        H2OFlashAttentionMetadataBuilder,
        H2OTritonAttentionMetadataBuilder,
    )

_Backend: Any = object


class _WholeBlocks(_Backend):
    """Scores lie behind a block's keys and values, so those of one layer have to lie together."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Those that vLLM prefers first."""
        names = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
        layouts = tuple(KVCacheLayout[name] for name in names)
        assert all(layout.is_block_compact for layout in layouts)
        return layouts


class H2OFlashAttentionBackend(_WholeBlocks, FlashAttentionBackend):
    """Same kernels, dtypes and head sizes as vLLM's ``FLASH_ATTN``."""

    @staticmethod
    def get_impl_cls() -> "type[H2OFlashAttentionImpl]":
        from vllm_h2o.engine.gpu.attention import H2OFlashAttentionImpl

        return H2OFlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> "type[H2OFlashAttentionMetadataBuilder]":
        from vllm_h2o.engine.gpu.builder import H2OFlashAttentionMetadataBuilder

        return H2OFlashAttentionMetadataBuilder


class H2OTritonAttentionBackend(_WholeBlocks, TritonAttentionBackend):
    """Same kernels, dtypes and head sizes as vLLM's ``TRITON_ATTN``."""

    @staticmethod
    def get_impl_cls() -> "type[H2OTritonAttentionImpl]":
        from vllm_h2o.engine.gpu.attention import H2OTritonAttentionImpl

        return H2OTritonAttentionImpl

    @staticmethod
    def get_builder_cls() -> "type[H2OTritonAttentionMetadataBuilder]":
        from vllm_h2o.engine.gpu.builder import H2OTritonAttentionMetadataBuilder

        return H2OTritonAttentionMetadataBuilder
