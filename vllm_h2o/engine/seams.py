"""The table of vLLM's extension points that we use, and the check that the installed vLLM has them.

``check_seams`` runs before anything is installed and refuses with the names that don't match;
``tests/test_seams.py`` checks the same table in CI, and ``scripts/check_seams.py`` against other versions.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vllm_h2o.errors import SeamError

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
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.get_num_blocks_to_allocate",
        ("request_id", "num_tokens", "new_computed_blocks"),
        "room for copies",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.add_local_computed_blocks",
        ("request_id",),
        "copies what is reused",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager._apply_cow",
        ("request_id", "block_idx", "source_block", "cow_block"),
        "copies what is reused",
    ),
    Seam(
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.pop_blocks_for_free",
        ("request_id",),
        "forgets the request",
    ),
    Seam("vllm.config:SchedulerConfig", ("scheduler_cls", "async_scheduling"), "our scheduler class"),
)

# Checked by ``vllm_h2o.engine.metrics`` only, where a policy is active.
METRICS_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.v1.metrics.stats:SchedulerStats", ("num_kv_fetch_reqs_by_stage",), "carries our report"),
    Seam(
        "vllm.v1.metrics.loggers:StatLoggerManager.__init__",
        ("vllm_config", "engine_idxs", "custom_stat_loggers"),
        "our metrics",
    ),
    Seam(
        "vllm.v1.metrics.loggers:AggregateStatLoggerBase.record",
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        "our metrics",
    ),
)

# Checked by ``vllm_h2o.engine.request_checks`` only, where a policy is active.
REQUEST_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.sampling_params:SamplingParams.from_optional", ("extra_args",), "limits of requests"),
    Seam("vllm.v1.engine.input_processor:InputProcessor.process_inputs", ("params",), "limits of requests"),
    Seam("vllm.exceptions:VLLMValidationError", (), "limits of requests"),
    Seam("vllm.config:CacheConfig.num_gpu_blocks", (), "limits of requests"),
)

# Checked by ``vllm_h2o.engine.scheduler`` only, which lives in the engine's process.
SCHEDULER_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.v1.core.sched.scheduler:Scheduler.update_from_output", ("model_runner_output",), "reports"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.make_stats", (), "reports"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler.add_request", ("request",), "limits of requests"),
    Seam("vllm.v1.core.sched.scheduler:Scheduler._free_request", ("request",), "limits of requests"),
    Seam("vllm.v1.core.sched.async_scheduler:AsyncScheduler", (), "the other base"),
    Seam("vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator", (), "has the managers"),
    Seam("vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks", ("request",), "cuts hits"),
    Seam("vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks", ("blocks",), "cuts hits"),
    Seam("vllm.v1.request:Request.__init__", ("sampling_params",), "has prompt and answer lengths"),
)

# Checked by ``vllm_h2o.engine.worker`` only: importing vLLM's CPU worker replaces functions of torch for the
# whole process, which nobody but a CPU worker may do.
WORKER_SEAMS: tuple[Seam, ...] = (
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory", ("self",), "takes off the ring"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.load_model", (), "finds what the loaded model refuses"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.get_kv_cache_spec", ("self",), "our KV cache spec"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.execute_model", ("scheduler_output",), "times the policy"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.sample_tokens", (), "times the policy"),
    Seam("vllm.v1.worker.cpu_worker:CPUWorker.initialize_from_config", ("kv_cache_config",), "has builders"),
    Seam(
        "vllm.v1.core.sched.output:SchedulerOutput",
        ("scheduled_new_reqs", "finished_req_ids", "kv_cache_block_copies"),
        "limits of requests, copies of blocks",
    ),
    Seam("vllm.v1.core.sched.output:NewRequestData", ("req_id", "sampling_params"), "limits of requests"),
    Seam("vllm.v1.worker.gpu_input_batch:InputBatch.req_ids", (), "limits of requests"),
)


# Checked by the GPU worker only: importing what they name takes a second that nobody else has to spend.
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

ALL_SEAMS = (*SEAMS, *WORKER_SEAMS, *METRICS_SEAMS, *REQUEST_SEAMS, *SCHEDULER_SEAMS, *GPU_SEAMS)


def check_seams(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Raise SeamError naming every seam that the installed vLLM does not match."""
    mismatches = [why for why in (seam.mismatch() for seam in seams) if why is not None]
    if mismatches:
        from vllm import __version__

        raise SeamError(
            f"vllm-h2o supports vLLM {' and '.join(SUPPORTED_VLLM)}; vLLM {__version__} differs: "
            f"{'; '.join(mismatches)}. Install a supported vLLM, or a newer vllm-h2o."
        )
