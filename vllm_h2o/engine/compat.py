"""Every vLLM name that is private or moves between versions; ``vllm_h2o.engine.seams`` checks them."""

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
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from vllm_h2o.config import KVPolicyConfig

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
    "ModelRunnerOutput",
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


def forget_selected_backends() -> None:
    """Drop vLLM's memory of which backend class it chose, after an override changed."""
    selector._cached_get_attn_backend.cache_clear()


def policy_of_current_config() -> KVPolicyConfig | None:
    """The resolved policy of the engine being set up in this process."""
    return KVPolicyConfig.from_additional_config(get_current_vllm_config().additional_config)
