"""What eviction can't serve, said before the first request; all reasons in one error."""

from collections.abc import Iterator

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import backend
from vllm_h2o.engine.compat import (
    CPU_WORKER,
    GPU_WORKER,
    Attention,
    AttentionLayerBase,
    AttentionType,
    CpuArchEnum,
    FullAttentionSpec,
    KVQuantMode,
    SlidingWindowSpec,
    VllmConfig,
    current_platform,
    get_layers_from_vllm_config,
)
from vllm_h2o.engine.gpu.refusals import OPT_IN, gpu_refusals, layer_refusal
from vllm_h2o.errors import ConfigError, Refusal, RefusedError
from vllm_h2o.settings import KVPolicySettings

CPU_BLOCK_MULTIPLE = 32
"""Tokens: vLLM's CPU kernels read blocks of a multiple of this."""

_PLAIN = "Serve this model without --kv-policy."


def refuse_engine(vllm_config: VllmConfig, settings: KVPolicySettings, wrong: ConfigError | None) -> None:
    """Raise RefusedError with every reason that the configuration alone shows.

    Args:
        wrong: what is wrong with the settings themselves, to be listed with the rest.
    """
    refusals = [*_platform(vllm_config, settings), *_features(vllm_config), *_model_config(vllm_config)]
    if refusals:
        if wrong is not None:
            refusals.append(Refusal(f"{wrong.setting}: {wrong.limit}", repr(wrong.value), wrong.fix))
        raise RefusedError(str(settings.name), refusals)


def refuse_model(vllm_config: VllmConfig, policy: KVPolicyConfig) -> None:
    """Raise RefusedError with every reason that only the loaded layers show."""
    if not policy.evicts:
        return
    # One line a reason, with the first layer that has it.
    refusals: dict[str, Refusal] = {}
    for refusal in _layers(vllm_config):
        refusals.setdefault(refusal.what, refusal)
    if refusals:
        raise RefusedError(policy.name, list(refusals.values()))


def refuse_small_pool(vllm_config: VllmConfig, policy: KVPolicyConfig) -> None:
    """Raise a ConfigError if a pool of a given number of blocks can't hold one request.

    vLLM finds that out as well, but its advice (less context, more memory) misses what counts here.
    """
    given = vllm_config.cache_config.num_gpu_blocks_override
    needed = policy.max_blocks_per_request + 1  # one is vLLM's placeholder
    if policy.evicts and given is not None and given < needed:
        raise ConfigError(
            "--num-gpu-blocks-override",
            given,
            _room_for_one(policy),
            f"Give at least {needed}, or lower those",
        )


def refuse_small_memory(vllm_config: VllmConfig, policy: KVPolicyConfig, needed: int, available: int) -> None:
    """As ``refuse_small_pool``, for a pool given in bytes: what one request needs, and what there is."""
    if vllm_config.cache_config.num_gpu_blocks_override is None and policy.evicts and available < needed:
        raise ConfigError(
            "--kv-cache-memory-bytes", vllm_config.cache_config.kv_cache_memory_bytes,
            f"{_room_for_one(policy)}, {needed} bytes; beside kept queries and scoring {available} are left",
            f"Give {needed - available} bytes more, or lower those",
        )  # fmt: skip


def _room_for_one(policy: KVPolicyConfig) -> str:
    return (
        f"one request needs up to {policy.max_blocks_per_request} blocks of {policy.block_size} tokens "
        f"while its prompt is computed ({_budget_flag(policy)} and --max-num-batched-tokens)"
    )


def _budget_flag(policy: KVPolicyConfig) -> str:
    if policy.prompt_budget_tokens is not None:
        return f"--kv-prompt-budget {policy.prompt_budget_tokens}"
    return f"--kv-budget {policy.budget_tokens}"


def _platform(vllm_config: VllmConfig, settings: KVPolicySettings) -> Iterator[Refusal]:
    if current_platform.is_cuda():
        refusals, worker = gpu_refusals(vllm_config, settings), GPU_WORKER
    elif current_platform.is_cpu():
        refusals, worker = _cpu(vllm_config, settings), CPU_WORKER
    else:
        yield Refusal(
            "platforms other than x86-64 CPUs and NVIDIA GPUs",
            current_platform.device_name,
            "Use a CPU machine.",
        )
        return
    yield from refusals
    worker_cls = vllm_config.parallel_config.worker_cls
    if worker_cls != worker:
        yield Refusal("a custom worker class", f"--worker-cls {worker_cls}", "Drop it.")
    scheduler_cls = vllm_config.scheduler_config.scheduler_cls
    if scheduler_cls is not None:
        yield Refusal("a custom scheduler class", f"--scheduler-cls {scheduler_cls}", "Drop it.")
    foreign = backend.foreign_override()
    if foreign is not None:
        yield Refusal(
            "another plugin replaces the attention backend",
            foreign,
            "Leave it out of VLLM_PLUGINS.",
        )


def _cpu(vllm_config: VllmConfig, settings: KVPolicySettings) -> Iterator[Refusal]:
    architecture = current_platform.get_cpu_architecture()
    if architecture != CpuArchEnum.X86:
        yield Refusal(
            "the KV cache layout of this CPU is not supported",
            architecture.name,
            "Use an x86-64 machine.",
        )
    block_size = vllm_config.cache_config.block_size
    if block_size % CPU_BLOCK_MULTIPLE:
        yield Refusal(
            f"vLLM's CPU kernels need blocks of a multiple of {CPU_BLOCK_MULTIPLE} tokens",
            f"--block-size {block_size}",
            f"Use {-(-block_size // CPU_BLOCK_MULTIPLE) * CPU_BLOCK_MULTIPLE}, or leave it out.",
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        yield Refusal(
            "pipeline parallelism on CPU (vLLM 0.32 itself fails at it)",
            f"--pipeline-parallel-size {stages}",
            "Use --tensor-parallel-size.",
        )
    if vllm_config.use_v2_model_runner:
        yield Refusal(
            "vLLM's V2 model runner on CPU", "it is the default where Triton has a CPU backend",
            "Set VLLM_USE_V2_MODEL_RUNNER=0.",
        )  # fmt: skip
    if settings.kernels == OPT_IN:
        yield Refusal("Triton kernels on CPU", f"kernels {OPT_IN}", "Use auto, native or torch.")


def _features(vllm_config: VllmConfig) -> Iterator[Refusal]:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if vllm_config.speculative_config is not None:
        method = vllm_config.speculative_config.method
        yield Refusal("speculative decoding", str(method), "Drop --speculative-config.")
    # Offloading comes with a connector that the user didn't name.
    if vllm_config.kv_transfer_config is not None and cache.kv_offloading_size is None:
        connector = vllm_config.kv_transfer_config.kv_connector
        yield Refusal("KV connectors", str(connector), "Drop --kv-transfer-config.")
    if cache.kv_offloading_size is not None:
        yield Refusal("KV offloading", f"{cache.kv_offloading_size} GiB", "Drop --kv-offloading-size.")
    for flag, size in (
        ("decode-context-parallel-size", parallel.decode_context_parallel_size),
        ("prefill-context-parallel-size", parallel.prefill_context_parallel_size),
    ):
        if size > 1:
            yield Refusal("context parallelism", f"--{flag} {size}", "Set it to 1.")
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        yield Refusal("quantised KV caches", cache.cache_dtype, "Use --kv-cache-dtype auto.")


def _model_config(vllm_config: VllmConfig) -> Iterator[Refusal]:
    model = vllm_config.model_config
    name = type(model.hf_config).__name__
    if model.runner_type != "generate":
        yield Refusal("pooling models", f"--runner {model.runner_type}", _PLAIN)
    if model.is_encoder_decoder:
        yield Refusal("encoder-decoder models", name, _PLAIN)
    if model.use_mla:
        yield Refusal("multi-head latent attention (MLA)", name, _PLAIN)
    if model.is_attention_free:
        yield Refusal("models without attention", name, _PLAIN)
    elif model.is_hybrid:
        yield Refusal("models with state-space or linear-attention layers", name, _PLAIN)
    if model.is_mm_prefix_lm:
        yield Refusal("models with bidirectional attention over images", name, _PLAIN)
    if model.uses_alibi:
        yield Refusal("ALiBi position biases", name, _PLAIN)


def _layers(vllm_config: VllmConfig) -> Iterator[Refusal]:
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    num_full = num_sliding = 0
    for layer_name, layer in layers.items():
        if not isinstance(layer, Attention):
            yield Refusal("attention layers of another kind", f"{layer_name}: {type(layer).__name__}", _PLAIN)
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if isinstance(spec, SlidingWindowSpec) or spec is None:
            num_sliding += spec is not None
            continue
        if layer.kv_sharing_target_layer_name is not None:
            target = layer.kv_sharing_target_layer_name
            yield Refusal("layers that share KV", f"{layer_name} uses {target}", _PLAIN)
        elif layer.attn_type != AttentionType.DECODER:
            yield Refusal("attention that isn't causal", f"{layer_name}: {layer.attn_type}", _PLAIN)
        elif getattr(layer.impl, "alibi_slopes", None) is not None:
            yield Refusal("ALiBi position biases", layer_name, _PLAIN)
        elif spec.kv_quant_mode != KVQuantMode.NONE:
            # The configuration can say "auto" and the checkpoint ask for it.
            quantised = f"{layer_name}: {layer.kv_cache_dtype}"
            yield Refusal("quantised KV caches", quantised, "Use a checkpoint without KV cache scales.")
        elif type(spec) is not FullAttentionSpec:
            yield Refusal("KV caches of another kind", f"{layer_name}: {type(spec).__name__}", _PLAIN)
        elif not backend.is_ours(layer.attn_backend):
            found, names = layer.attn_backend.get_name(), " or ".join(backend.names())
            fix = f"Use --attention-backend {names}." if current_platform.is_cuda() else _PLAIN
            yield Refusal("attention backends that aren't wrapped", found, fix)
        elif current_platform.is_cuda() and (wrong := layer_refusal(layer_name, layer, spec)) is not None:
            yield wrong
        else:
            num_full += 1
    if num_sliding and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        yield Refusal(
            "sliding-window layers without vLLM's hybrid KV cache manager",
            "disable_hybrid_kv_cache_manager=True",
            "Drop --disable-hybrid-kv-cache-manager.",
        )
    # A pipeline stage may well have none; no stage sees the others' layers.
    if not num_full and vllm_config.parallel_config.pipeline_parallel_size == 1:
        yield Refusal("a model with no full-attention layer: there is nothing to evict", "none", _PLAIN)
