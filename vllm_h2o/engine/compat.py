"""Every vLLM name that is private or moves between versions, and the table that checks them.

Supported: vLLM 0.32 and 0.33. ``check_seams`` runs before anything is installed and refuses with the names
that don't match; ``tests/test_seams.py`` checks the same table in CI.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import CpuArchEnum, current_platform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import SeamError

__all__ = [
    "Attention",
    "AttentionBackendEnum",
    "AttentionLayerBase",
    "AttentionSpec",
    "AttentionType",
    "BlockPool",
    "CPUAttentionBackend",
    "CPUAttentionBackendImpl",
    "CPUAttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "CpuArchEnum",
    "EngineArgs",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheSpec",
    "KVCacheSpecRegistry",
    "KVQuantMode",
    "Request",
    "SlidingWindowSpec",
    "VllmConfig",
    "current_platform",
    "get_layers_from_vllm_config",
    "init_logger",
    "register_backend",
]

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
"""The worker that vLLM picks on CPU, and that ``vllm_h2o.engine.worker`` extends."""

GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
"""As ``CPU_WORKER``, on NVIDIA GPUs; ``vllm_h2o.engine.gpu.worker`` extends it."""

SUPPORTED_VLLM = ("0.32", "0.33")


@dataclass(frozen=True)
class Seam:
    """One extension point: where it is, the parameters it must take, what we use it for."""

    path: str
    parameters: tuple[str, ...]
    purpose: str

    @property
    def name(self) -> str:
        return self.path.replace(":", ".")

    def resolve(self) -> Any:
        """The object itself; raises ImportError or AttributeError where it does not exist."""
        module, _, attributes = self.path.partition(":")
        target: Any = import_module(module)
        for attribute in attributes.split("."):
            target = getattr(target, attribute)
        return target

    def mismatch(self) -> str | None:
        """Why the installed vLLM does not fit; None if it does."""
        try:
            target = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.name} is missing ({error})"
        if not self.parameters:
            return None
        present = _parameter_names(target)
        missing = [name for name in self.parameters if name not in present]
        return f"{self.name} has no parameter {', '.join(missing)}" if missing else None


def _parameter_names(target: Any) -> set[str]:
    fields = getattr(target, "__dataclass_fields__", None)
    if fields is not None:
        return set(fields)
    callable_target: Callable[..., Any] = target
    return set(inspect.signature(callable_target).parameters)


SEAMS: tuple[Seam, ...] = (
    Seam("vllm.engine.arg_utils:EngineArgs.add_cli_args", ("parser",), "adds --kv-policy and friends"),
    Seam(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        ("args",),
        "takes them into additional_config",
    ),
    Seam(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        ("usage_context", "headless"),
        "resolves and checks the policy once the model is known",
    ),
    Seam(
        "vllm.engine.arg_utils:EngineArgs",
        ("additional_config", "block_size"),
        "carries the settings",
    ),
    Seam("vllm.config:VllmConfig.max_in_flight_tokens", (), "bounds the blocks of a request"),
    Seam("vllm.config:VllmConfig.use_v2_model_runner", (), "refuses the other runner"),
    Seam("vllm.config:ParallelConfig", ("worker_cls", "worker_extension_cls"), "our worker class"),
    Seam(
        "vllm.v1.attention.backends.registry:register_backend",
        ("backend", "class_path"),
        "our attention backends",
    ),
    Seam(
        "vllm.v1.attention.selector:_cached_get_attn_backend.cache_clear",
        (),
        "forgets vLLM's choice",
    ),
    Seam(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        (
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "num_reqs",
            "max_seq_len",
            "block_table_tensor",
        ),
        "the batch, as the builder sees it",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        "leaves the gap out of tables and lengths",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers",
        ("layer_names",),
        "picks the cache layout",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
        ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
        "scores and compacts after the kernel",
    ),
    Seam("vllm.v1.kv_cache_interface:FullAttentionSpec", ("page_size_padded",), "room for the scores"),
    Seam(
        "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes",
        ("vllm_config",),
        "sizing",
    ),
    Seam("vllm.v1.kv_cache_interface:FullAttentionSpec.merge", ("specs",), "one spec for a group"),
    Seam(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        ("kvcache_spec_cls", "manager_class", "uniform_type_base_spec"),
        "our block manager",
    ),
    Seam(
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.check_kv_cache_spec_registry",
        ("kv_cache_spec",),
        "registers vLLM's own specs first",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.__init__",
        ("kv_cache_spec", "max_admission_blocks_per_request"),
        "admission cap",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.remove_skipped_blocks",
        ("request_id", "processed_computed_tokens", "num_prompt_tokens"),
        "frees evicted blocks",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager._remove_blocks_in_range",
        ("request_id", "first_block", "last_block"),
        "frees evicted blocks",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks",
        ("request", "num_tokens"),
        "caches pinned blocks only",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit",
        ("block_hashes", "max_length", "kv_cache_group_ids", "block_pool", "kv_cache_spec"),
        "hits end at the pinned blocks",
    ),
)

# Checked by ``vllm_h2o.engine.worker`` only: importing vLLM's CPU worker replaces functions of torch for the
# whole process, which nobody but a CPU worker may do.
WORKER_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory", ("self",), "takes off the ring"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.load_model", (), "finds what the loaded model refuses"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.get_kv_cache_spec", ("self",), "our KV cache spec"),
)


def check_seams(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Raise SeamError naming every seam that the installed vLLM does not match."""
    mismatches = [why for why in (seam.mismatch() for seam in seams) if why is not None]
    if mismatches:
        from vllm import __version__

        raise SeamError(
            f"vllm-h2o supports vLLM {' and '.join(SUPPORTED_VLLM)}; vLLM {__version__} differs: "
            f"{'; '.join(mismatches)}. Install a supported vLLM, or a newer vllm-h2o."
        )


def forget_selected_backends() -> None:
    """Drop vLLM's memory of which backend class it chose, after an override changed."""
    selector._cached_get_attn_backend.cache_clear()


def policy_of_current_config() -> KVPolicyConfig | None:
    """The resolved policy of the engine being set up in this process."""
    return KVPolicyConfig.from_additional_config(get_current_vllm_config().additional_config)
