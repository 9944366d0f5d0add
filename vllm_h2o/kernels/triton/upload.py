"""Descriptors of a step on their way to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.device_plan import DeviceTable

_ALIGNED_WORDS = 4


def live_table(table: Any, num_blocks: int, device: torch.device) -> torch.Tensor:
    """``[num_rows, num_blocks]`` int32 on the device, of a table there or on the host."""
    if isinstance(table, DeviceTable):
        return table.live(num_blocks)
    (uploaded,) = to_device([table[:, :num_blocks]], device)
    return uploaded


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Integers as int32 and floats as float32, all in one copy that the host doesn't wait for."""
    words = [
        np.ascontiguousarray(a, dtype=np.float32 if a.dtype.kind == "f" else np.int32)
        .view(np.int32)
        .reshape(-1)
        for a in arrays
    ]
    # Each part begins at a multiple of 16 bytes: Triton compiles a kernel anew for other alignments.
    starts = np.cumsum([0, *(-(-w.size // _ALIGNED_WORDS) * _ALIGNED_WORDS for w in words)])
    packed = torch.zeros(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, part in zip(starts, words, strict=False):
        packed.numpy()[start : start + part.size] = part
    on_device = packed.to(device, non_blocking=True)
    found = []
    for start, part, array in zip(starts, words, arrays, strict=False):
        tensor = on_device[start : start + part.size]
        found.append((tensor.view(torch.float32) if array.dtype.kind == "f" else tensor).view(array.shape))
    return found
