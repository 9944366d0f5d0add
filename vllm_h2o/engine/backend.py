"""Attention backends with our metadata builders and our attention, where vLLM would pick its own.

This one is vLLM's CPU backend; those for GPUs are in ``vllm_h2o.engine.gpu.backend``. Builder and attention
are imported on first use: this module is loaded wherever the plugin is, with a policy or without, and they
bring the KV cache spec with them, which registers itself, and all of vLLM's specs before it.
"""

from typing import TYPE_CHECKING, Any

from vllm_h2o.engine.compat import (
    AttentionBackendEnum,
    CPUAttentionBackend,
    current_platform,
    forget_selected_backends,
    register_backend,
)

if TYPE_CHECKING:
    from vllm_h2o.engine.attention import H2OCPUAttentionImpl
    from vllm_h2o.engine.builder import H2OCPUMetadataBuilder

_GPU = "vllm_h2o.engine.gpu.backend"
_CPU_PATHS = {AttentionBackendEnum.CPU_ATTN: f"{__name__}.H2OCPUAttentionBackend"}
_GPU_PATHS = {
    AttentionBackendEnum.FLASH_ATTN: f"{_GPU}.H2OFlashAttentionBackend",
    AttentionBackendEnum.TRITON_ATTN: f"{_GPU}.H2OTritonAttentionBackend",
}


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


def paths() -> dict[Any, str]:
    """Class paths of our backends on this platform, by the member of vLLM's registry that each replaces."""
    return _GPU_PATHS if current_platform.is_cuda() else _CPU_PATHS


def activate() -> None:
    """Make this process pick our backends where vLLM would pick those we wrap. Idempotent."""
    for member, path in paths().items():
        register_backend(member, path)
    forget_selected_backends()


def deactivate() -> None:
    """Undo ``activate``, so that an engine without a policy in the same process gets stock vLLM."""
    active = [member for member, path in paths().items() if member.get_path() == path]
    for member in active:
        member.clear_override()
    if active:
        forget_selected_backends()


def is_active() -> bool:
    return all(member.get_path() == path for member, path in paths().items())


def is_ours(backend: type) -> bool:
    """Whether a layer's backend is one of ours, for this platform."""
    return f"{backend.__module__}.{backend.__qualname__}" in paths().values()


def names() -> list[str]:
    """What users call the backends that are wrapped on this platform."""
    return [member.name for member in paths()]


def foreign_override() -> str | None:
    """Class path of another plugin's backend in a place we need; None if all are free."""
    for member, path in paths().items():
        if member.is_overridden() and member.get_path() != path:
            return member.get_path()
    return None
