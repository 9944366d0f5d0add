"""A step's work as the Triton kernels take it: descriptors on the device, and the launches in order."""

import numpy as np
import torch
import triton

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import KernelError
from vllm_h2o.kernels.base import Kernels, LayerSizes, LayerState, PreparedStep
from vllm_h2o.kernels.triton import compaction, scoring
from vllm_h2o.kernels.triton.drop_rows import SCRATCH_BYTES, DropWork, piece_bytes
from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.score_rows import ScoreWork
from vllm_h2o.kernels.triton.upload import to_device
from vllm_h2o.step_plan import StepPlan

_TILE = 1024


class TritonKernels(Kernels):
    """For GPUs; in Triton's interpreter also on a CPU, for tests."""

    name = "triton"

    def __init__(self, config: KVPolicyConfig, device: torch.device) -> None:
        super().__init__(config)
        self.device = device
        self._groups: dict[int, LayerGroup] = {}

    def prepare(self, plan: StepPlan) -> "TritonStep":
        return TritonStep(self, plan)

    def group(self, layer: LayerState) -> LayerGroup:
        """The layer as a group of its own, made when it is first seen."""
        known = self._groups.get(id(layer))
        if known is None:
            known = self._groups[id(layer)] = LayerGroup.of([layer])
        return known

    def scratch_bytes(self, sizes: LayerSizes) -> int:
        config = self.config
        live_tokens = config.max_blocks_per_request * config.block_size
        lse = 4 * sizes.num_heads * config.max_in_flight_tokens if config.scores_attention else 0
        longest = sizes.num_kv_heads * piece_bytes(config, live_tokens, live_tokens, config.max_model_len)
        return lse + max(SCRATCH_BYTES, longest)


class TritonStep(PreparedStep):
    """Descriptors that serve all layers."""

    def __init__(self, kernels: TritonKernels, plan: StepPlan) -> None:
        self._kernels = kernels
        config, device = kernels.config, kernels.device
        self._appended = plan.append_tokens.size
        slots = np.full(int(plan.append_tokens.max(initial=-1)) + 1, -1)
        slots[plan.append_tokens] = plan.append_slots
        self._slots, self._started, self._started_positions = to_device(
            [slots, plan.started_blocks, plan.started_positions], device
        )
        self._scores = [ScoreWork.of(rows, config, device) for rows in plan.scores]
        self._drops = None if plan.drops is None else DropWork.of(plan.drops, config, device)

    def after_attention(self, layer: LayerState, query: torch.Tensor) -> None:
        """As ``PreparedStep`` says.

        Raises:
            KernelError: the layer's memory or the queries aren't what the kernels take.
        """
        group = self._kernels.group(layer)
        _check_query(query, group)
        if self._appended:
            keep_queries(query, layer.ring, self._slots)
        if self._started.numel():
            draws = self._kernels.config.rank_by == "random"
            start_blocks(group, self._started, self._started_positions, draws=draws)
        for work in self._scores:
            work.run(group, layer.ring if work.from_ring else query)
        if self._drops is not None:
            self._drops.run(group)


def keep_queries(query: torch.Tensor, ring: torch.Tensor, slots: torch.Tensor) -> None:
    """Copy query ``i`` to ``ring[slots[i]]``, where that isn't -1.

    Args:
        query: ``[num_tokens, num_heads, head_size]``.
        slots: ``[at most num_tokens]`` int32.
    """
    width = ring.stride(0)
    grid = (slots.numel(), triton.cdiv(width, _TILE))
    scoring.keep_queries_kernel[grid](query, ring, slots, query.stride(0), width, WIDTH=width, TILE=_TILE)


def start_blocks(
    group: LayerGroup, started: torch.Tensor, started_positions: torch.Tensor, *, draws: bool
) -> None:
    """Reset the scores of blocks that get their first token; arguments as in ``start_blocks_kernel``."""
    compaction.start_blocks_kernel[(started.numel(), group.num_kv_heads, len(group.layers))](
        group.score_ptrs, group.position_ptrs, group.salts, started, started_positions, **group.score_strides,
        NUM_KV_HEADS=group.num_kv_heads, BLOCK_SIZE=group.block_size, HAS_POSITIONS=group.has_positions,
        DRAWS=draws,
    )  # fmt: skip


def _check_query(query: torch.Tensor, group: LayerGroup) -> None:
    head_size = group.sizes["HEAD_SIZE"]
    if query.ndim != 3 or query.shape[1:] != (group.num_heads, head_size):
        raise KernelError("shape of query", tuple(query.shape), f"[tokens, {group.num_heads}, {head_size}]")
    if query.device != group.device:
        raise KernelError("device of query", query.device, f"{group.device}, as the cache")
    if query.dtype != group.first.ring.dtype:
        raise KernelError("dtype of query", query.dtype, f"{group.first.ring.dtype}, as the kept queries")
    if query.stride()[1:] != (head_size, 1):
        raise KernelError("strides of query", query.stride(), f"(any, {head_size}, 1)")
