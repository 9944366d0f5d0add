"""Layers that share a launch: their addresses as tensors, and what all of them have in common, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_h2o.errors import KernelError
from vllm_h2o.kernels.base import LayerState
from vllm_h2o.kernels.triton import MAX_BLOCK_SIZE, MAX_HEAD_SIZE

_TYPES: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}
_BITS_OF_BYTES = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def triton_type(dtype: torch.dtype) -> Any:
    """The kernels' name of a cache's or a query's dtype.

    Raises:
        KernelError: they have none.
    """
    if dtype not in _TYPES:
        raise KernelError("dtype", dtype, f"one of {', '.join(map(str, _TYPES))}")
    return _TYPES[dtype]


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """``L`` layers of one shape on one device.

    Attributes:
        layers: they own the memory that the addresses point to.
        key_ptrs, value_ptrs, score_ptrs, position_ptrs, ring_ptrs: ``[L]`` int64.
        scales: ``[L]`` float32.
        sinks: ``[L, num_heads]`` float32, or empty.
        salts: ``[L]`` int32.
    """

    layers: tuple[LayerState, ...]
    key_ptrs: torch.Tensor
    value_ptrs: torch.Tensor
    score_ptrs: torch.Tensor
    position_ptrs: torch.Tensor
    ring_ptrs: torch.Tensor
    scales: torch.Tensor
    sinks: torch.Tensor
    salts: torch.Tensor

    @classmethod
    def of(cls, layers: Sequence[LayerState]) -> "LayerGroup":
        """Check the layers and collect their addresses.

        Raises:
            KernelError: device, dtype, shape or strides can't be served, or differ from layer to layer.
        """
        for layer in layers:
            _check(layer, layers[0])
        caches = [layer.cache for layer in layers]
        device = caches[0].keys.device

        def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)

        sinks = [layer.shape.sinks for layer in layers if layer.shape.sinks is not None]
        return cls(
            tuple(layers),
            addresses([cache.keys for cache in caches]),
            addresses([cache.values for cache in caches]),
            addresses([cache.scores for cache in caches]),
            addresses([cache.scores if cache.positions is None else cache.positions for cache in caches]),
            addresses([layer.ring for layer in layers]),
            torch.tensor([layer.shape.scale for layer in layers], dtype=torch.float32, device=device),
            torch.stack(sinks) if sinks else torch.empty(0, device=device),
            torch.tensor([layer.salt for layer in layers], dtype=torch.int32, device=device),
        )

    @property
    def first(self) -> LayerState:
        return self.layers[0]

    @property
    def device(self) -> torch.device:
        return self.key_ptrs.device

    @property
    def num_kv_heads(self) -> int:
        return self.first.cache.keys.shape[1]

    @property
    def num_heads(self) -> int:
        return self.first.ring.shape[1]

    @property
    def block_size(self) -> int:
        return self.first.cache.block_size

    @property
    def has_positions(self) -> bool:
        return self.first.cache.positions is not None

    @property
    def sizes(self) -> dict[str, int]:
        """Compile-time sizes that most kernels take."""
        head_size = self.first.cache.keys.shape[2]
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "HEAD_SIZE": head_size,
            "PADDED_SIZE": max(16, triton.next_power_of_2(head_size)),
            "BLOCK_SIZE": self.block_size,
        }

    @property
    def key_type(self) -> Any:
        return triton_type(self.first.cache.keys.dtype)

    @property
    def bits_type(self) -> Any:
        return _BITS_OF_BYTES[self.first.cache.keys.element_size()]

    @property
    def key_strides(self) -> dict[str, int]:
        return _named("key_stride", self.first.cache.keys, "block", "head", "dim", "slot")

    @property
    def value_strides(self) -> dict[str, int]:
        return _named("value_stride", self.first.cache.values, "block", "head", "slot", "dim")

    @property
    def score_strides(self) -> dict[str, int]:
        return _named("score_stride", self.first.cache.scores, "block", "head")


def _named(prefix: str, tensor: torch.Tensor, *dims: str) -> dict[str, int]:
    return {f"{prefix}_{dim}": stride for dim, stride in zip(dims, tensor.stride(), strict=False)}


def _check(layer: LayerState, first: LayerState) -> None:
    cache, ring = layer.cache, layer.ring
    triton_type(cache.keys.dtype)
    head_size, block_size = cache.keys.shape[2:]
    if head_size > MAX_HEAD_SIZE:
        raise KernelError("head size", head_size, f"at most {MAX_HEAD_SIZE}")
    if block_size > MAX_BLOCK_SIZE or block_size & (block_size - 1):
        raise KernelError("block size", block_size, f"a power of two up to {MAX_BLOCK_SIZE}")
    if ring.ndim != 3 or ring.shape[2] != head_size or ring.shape[1] % cache.keys.shape[1]:
        expected = f"[slots, a multiple of {cache.keys.shape[1]} heads, {head_size}]"
        raise KernelError("shape of the kept queries", tuple(ring.shape), expected)
    if not ring.is_contiguous():
        raise KernelError("strides of the kept queries", ring.stride(), "contiguous")
    if cache.scores.stride(2) != 1:
        raise KernelError("stride of scores", cache.scores.stride(2), "1 between slots")
    if cache.positions is not None and cache.positions.stride() != cache.scores.stride():
        raise KernelError(
            "strides of positions", cache.positions.stride(), f"{cache.scores.stride()}, as scores"
        )
    for name in ("keys", "values", "scores", "positions"):
        ours, theirs = getattr(cache, name), getattr(first.cache, name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None:
            raise KernelError(f"{name} of {layer.name}", ours is not None, f"as of {first.name}")
        for what in ("device", "dtype", "shape"):
            if getattr(ours, what) != getattr(theirs, what):
                raise KernelError(
                    f"{what} of {name} of {layer.name}", getattr(ours, what), f"{getattr(theirs, what)}"
                )
        if ours.stride() != theirs.stride():
            raise KernelError(f"strides of {name} of {layer.name}", ours.stride(), f"{theirs.stride()}")
    if ring.device != cache.keys.device or ring.shape != first.ring.shape or ring.dtype != first.ring.dtype:
        found = f"{ring.device}, {ring.dtype}, {tuple(ring.shape)}"
        expected = f"{cache.keys.device}, {first.ring.dtype}, {tuple(first.ring.shape)}"
        raise KernelError(f"kept queries of {layer.name}", found, expected)
    if (layer.shape.sinks is None) != (
        first.shape.sinks is None
    ) or layer.shape.softcap != first.shape.softcap:
        raise KernelError(f"sinks or softcap of {layer.name}", layer.shape, f"as of {first.name}")
