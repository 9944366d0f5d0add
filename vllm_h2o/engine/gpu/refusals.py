"""What eviction can't serve on GPUs; the rest is in ``vllm_h2o.engine.refusals``."""

from collections.abc import Iterator
from typing import Any

from vllm_h2o.engine.compat import VllmConfig, current_platform
from vllm_h2o.errors import Refusal
from vllm_h2o.kernels.triton import MAX_BLOCK_SIZE, MAX_HEAD_SIZE
from vllm_h2o.settings import KVPolicySettings

OPT_IN = "triton"
"""The choice of kernels that says: try it on this GPU."""

MIN_CAPABILITY = (8, 0)
"""Compute capability: the least that ``tests/test_triton_compile.py`` compiles for."""


def gpu_refusals(vllm_config: VllmConfig, settings: KVPolicySettings) -> Iterator[Refusal]:
    """What the configuration alone shows."""
    parallel = vllm_config.parallel_config
    if settings.kernels != OPT_IN:
        yield Refusal(
            "GPUs, unless you ask for them: the kernels for GPUs are tested in Triton's interpreter and were "
            "not run on a GPU yet",
            f"{current_platform.device_name}, kernels {settings.kernels or 'auto'}",
            f'Set kernels: {OPT_IN} in additional_config["kv_policy"] to try them, or use a CPU machine.',
        )
    capability = current_platform.get_device_capability()
    if capability is not None and tuple(capability) < MIN_CAPABILITY:
        yield Refusal(
            "GPUs of compute capability below 8.0",
            f"{capability[0]}.{capability[1]}",
            "Use a newer one (Ampere or later).",
        )
    if not vllm_config.use_v2_model_runner:
        yield Refusal("vLLM's V1 model runner on GPUs", "V1", "Set VLLM_USE_V2_MODEL_RUNNER=1.")
    block_size = vllm_config.cache_config.block_size
    if block_size > MAX_BLOCK_SIZE or block_size & (block_size - 1):
        yield Refusal(
            f"blocks that aren't a power of two up to {MAX_BLOCK_SIZE} tokens",
            f"--block-size {block_size}",
            f"Use {min(MAX_BLOCK_SIZE, 1 << (block_size - 1).bit_length())}, or leave it out.",
        )
    if settings.prompt_budget is not None:
        yield Refusal(
            "a budget of prompts on GPUs", f"--kv-prompt-budget {settings.prompt_budget}", "Drop it."
        )
    if settings.trace:
        yield Refusal("traces on GPUs", "kv_policy.trace True", "Leave it out.")
    if parallel.use_ubatching:
        yield Refusal("steps split into microbatches", "--enable-dbo or --ubatch-size", "Drop it.")
    window = vllm_config.model_config.rswa_window
    if window is not None:
        yield Refusal(
            "reference sliding-window attention",
            f"rswa_window {window}",
            "Serve this model without --kv-policy.",
        )


def layer_refusal(name: str, layer: Any, spec: Any) -> Refusal | None:
    """What a full-attention layer shows once it is loaded."""
    fix = "Serve this model without --kv-policy."
    if layer.head_size > MAX_HEAD_SIZE:
        return Refusal(f"heads of more than {MAX_HEAD_SIZE} numbers", f"{name}: {layer.head_size}", fix)
    if spec.head_size_v != spec.head_size:
        sizes = f"{name}: {spec.head_size} and {spec.head_size_v}"
        return Refusal("keys and values of different sizes", sizes, fix)
    return None
