"""What a layer does after its attention kernel, once per implementation.

    plain    tensor operations of torch: runs everywhere, says what the others have to compute
    native   C++ for CPUs, compiled on the machine that runs it
    triton   for GPUs

All take the same ``StepPlan`` (``vllm_h2o.step_plan``) and change a layer's cache in the same way.
"""

import logging
from functools import cache

import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.kernels.base import Kernels
from vllm_h2o.kernels.native.build import BuildError
from vllm_h2o.kernels.native.prepare import NativeKernels
from vllm_h2o.kernels.plain.prepare import PlainKernels

logger = logging.getLogger("vllm.h2o.kernels")


def create(config: KVPolicyConfig, device: torch.device | None = None) -> Kernels:
    """The implementation that ``kernels`` of the configuration asks for; on a GPU ``auto`` is ``triton``.

    Args:
        device: where the caches lie; None is the CPU.

    Raises:
        ConfigError: ``native`` was asked for and can't be built here; the compiler's reason is in it.
    """
    if device is None:
        device = torch.device("cpu")
    if config.kernels == "triton" or (config.kernels == "auto" and device.type == "cuda"):
        from vllm_h2o.kernels.triton.prepare import TritonKernels  # Triton is not everywhere

        return TritonKernels(config, device)
    if config.kernels == "torch":
        return PlainKernels(config)
    try:
        return NativeKernels(config)
    except BuildError as error:
        if config.kernels == "native":
            raise ConfigError(
                "kernels", config.kernels, str(error), "Install a C++ compiler (g++), or use torch"
            ) from error
        _say_slow(str(error))
        return PlainKernels(config)


@cache
def _say_slow(reason: str) -> None:
    """Once per process, however many ask for kernels."""
    logger.warning(
        "KV policy: scores are computed by torch, several times slower than by the native kernels, because "
        "those can't be built here: %s. Install a C++ compiler (g++) and start again.",
        reason,
    )
