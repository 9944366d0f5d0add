"""Attention backend: vLLM's CPU backend with our metadata builder and our attention.

Both are imported on first use: this module is loaded wherever the plugin is, with a policy or without, and
they bring the KV cache spec with them, which registers itself, and all of vLLM's specs before it.
"""

from typing import TYPE_CHECKING

from vllm_h2o.engine.compat import (
    AttentionBackendEnum,
    CPUAttentionBackend,
    forget_selected_backends,
    register_backend,
)

if TYPE_CHECKING:
    from vllm_h2o.engine.attention import H2OCPUAttentionImpl
    from vllm_h2o.engine.builder import H2OCPUMetadataBuilder

_PATH = f"{__name__}.H2OCPUAttentionBackend"


class H2OCPUAttentionBackend(CPUAttentionBackend):
    """Same kernels, dtypes, head sizes and cache layout as vLLM's ``CPU_ATTN``."""

    @staticmethod
    def get_impl_cls() -> "type[H2OCPUAttentionImpl]":
        from vllm_h2o.engine.attention import H2OCPUAttentionImpl

        return H2OCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> "type[H2OCPUMetadataBuilder]":
        from vllm_h2o.engine.builder import H2OCPUMetadataBuilder

        return H2OCPUMetadataBuilder


def activate() -> None:
    """Make this process pick our backend where vLLM would pick the one we wrap. Idempotent."""
    register_backend(AttentionBackendEnum.CPU_ATTN, _PATH)
    forget_selected_backends()


def deactivate() -> None:
    """Undo ``activate``, so that an engine without a policy in the same process gets stock vLLM."""
    if is_active():
        AttentionBackendEnum.CPU_ATTN.clear_override()
        forget_selected_backends()


def is_active() -> bool:
    return AttentionBackendEnum.CPU_ATTN.get_path() == _PATH


def foreign_override() -> str | None:
    """Class path of another plugin's backend in the place we need; None if it is free."""
    member = AttentionBackendEnum.CPU_ATTN
    return member.get_path() if member.is_overridden() and not is_active() else None
