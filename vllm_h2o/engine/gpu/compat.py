"""Names of vLLM that only the GPU needs, and the table that checks them; the rest is in ``engine.compat``.

Checked by the GPU worker: importing these takes a second that no other process has to spend.
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

from vllm_h2o.engine.compat import Seam

__all__ = [
    "GPU_SEAMS",
    "AttentionCGSupport",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadataBuilder",
    "KVCacheLayout",
    "TritonAttentionBackend",
    "TritonAttentionImpl",
    "TritonAttentionMetadataBuilder",
]

_BACKENDS = "vllm.v1.attention.backends"
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
_RUNNER = "vllm.v1.worker.gpu"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"

GPU_SEAMS: tuple[Seam, ...] = (
    *(
        Seam(f"{_BACKENDS}.{module}:{builder}.{method}", parameters, purpose)
        for module, builder in (
            ("flash_attn", "FlashAttentionMetadataBuilder"),
            ("triton_attn", "TritonAttentionMetadataBuilder"),
        )
        for method, parameters, purpose in (
            ("__init__", ("kv_cache_spec", "layer_names", "vllm_config", "device"), "sets up the planner"),
            ("build", _BUILD, "leaves the gap out of tables and lengths"),
            ("build_for_cudagraph_capture", ("common_attn_metadata",), "captures buffers that stay"),
            ("get_cudagraph_support", ("vllm_config", "kv_cache_spec"), "keeps chunks out of full graphs"),
        )
    ),
    Seam(f"{_BACKENDS}.flash_attn:FlashAttentionImpl.forward", _FORWARD, "keeps and scores queries"),
    Seam(f"{_BACKENDS}.triton_attn:TritonAttentionImpl.forward", _FORWARD, "keeps and scores queries"),
    Seam(f"{_BACKENDS}.flash_attn:FlashAttentionBackend.get_name", (), "the wrapped backend"),
    Seam(f"{_BACKENDS}.triton_attn:TritonAttentionBackend.get_name", (), "the wrapped backend"),
    Seam("vllm.v1.attention.backend:AttentionBackend.supported_kv_cache_layouts", (), "keeps blocks whole"),
    Seam("vllm.v1.attention.backend:AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE", (), "decode graphs"),
    Seam("vllm.v1.kv_cache_layout:KVCacheLayout.is_block_compact", (), "keeps blocks whole"),
    Seam(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        ("req_idx", "is_prefilling", "_num_computed_tokens_cache"),
        "the batch, as V2's builders see it",
    ),
    Seam(
        f"{_RUNNER}.attn_utils:build_attn_metadata",
        ("seq_lens_cpu_upper_bound", "is_prefilling", "for_cudagraph_capture", "req_idx"),
        "hands the batch to the builders",
    ),
    Seam(
        f"{_RUNNER}.input_batch:InputBatch",
        ("idx_mapping_np", "is_prefilling_np", "seq_lens_cpu_upper_bound", "query_start_loc_np"),
        "the batch, as the V2 runner has it",
    ),
    Seam(f"{_WORKER}.determine_available_memory", ("self",), "takes off the ring"),
    Seam(f"{_WORKER}.load_model", (), "finds what the loaded model refuses"),
    Seam(f"{_WORKER}.get_kv_cache_spec", ("self",), "our KV cache spec"),
    Seam(f"{_WORKER}.initialize_from_config", ("kv_cache_config",), "sees that nobody zeroes blocks"),
    Seam("vllm.v1.kv_cache_interface:KVCacheConfig.needs_kv_cache_zeroing", (), "as above"),
    Seam("vllm.config:ParallelConfig.use_ubatching", (), "refuses split batches"),
    Seam("vllm.config:ModelConfig.rswa_window", (), "refuses windows over a reference"),
)
