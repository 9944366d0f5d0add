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
from vllm_h2o.step_plan import IntArray, StepPlan

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
        queries = 0
        if config.scores_attention:
            # The chunks of one layer, or the kept queries of all.
            queries = max(config.max_in_flight_tokens, sizes.num_layers * sizes.num_ring_queries)
        pieces = sizes.num_layers * sizes.num_kv_heads
        longest = pieces * piece_bytes(config, live_tokens, live_tokens, config.max_model_len)
        return 4 * sizes.num_heads * queries + max(SCRATCH_BYTES, longest)


class TritonStep(PreparedStep):
    """A step's work in the order in which it has to be done; descriptors serve all layers.

    What belongs before and after the step's own chunks can be done for all layers of a group at once.
    """

    def __init__(self, kernels: TritonKernels, plan: StepPlan) -> None:
        self._kernels = kernels
        config, device = kernels.config, kernels.device
        self.append_slots = append_slots(plan)
        self._started, self._started_positions = to_device(
            [plan.started_blocks, plan.started_positions], device
        )
        if plan.table is not None:
            self._started = torch.take(plan.table, self._started.long())
        works = [ScoreWork.of(rows, config, device) for rows in plan.scores]
        # Kept queries come before a row's chunk or after it, so that each is scored once.
        chunk = next((i for i, work in enumerate(works) if not work.from_ring), 0)
        self._before, self._after = works[:chunk], works[chunk:]
        self._chunks: list[ScoreWork] = []
        if self._after and not self._after[0].from_ring:
            self._chunks = [self._after.pop(0)]
        self._drops = None if plan.drops is None else DropWork.of(plan.drops, config, device)

    def start(self, group: LayerGroup) -> None:
        """Before the step's attention: score what is pending, reset the blocks that begin."""
        for work in self._before:
            work.run(group, group.first.ring)
        if self._started.numel():
            draws = self._kernels.config.rank_by == "random"
            start_blocks(group, self._started, self._started_positions, draws=draws)

    def score_chunks(self, group: LayerGroup, query: torch.Tensor) -> None:
        """After one layer's attention, whose queries are not kept."""
        for work in self._chunks:
            work.run(group, query)

    def finish(self, group: LayerGroup) -> None:
        """Once all queries of the step are kept, any time before the next step: score them, drop tokens."""
        self._score_kept(group)
        self._drop(group)

    def _score_kept(self, group: LayerGroup) -> None:
        for work in self._after:
            work.run(group, group.first.ring)

    def _drop(self, group: LayerGroup) -> None:
        if self._drops is not None:
            self._drops.run(group)

    def update_scores(self, layer: LayerState, query: torch.Tensor) -> None:
        """As ``PreparedStep`` says, for one layer.

        Raises:
            KernelError: the layer's memory or the queries aren't what the kernels take.
        """
        group = self._kernels.group(layer)
        check_query(query, group)
        self.start(group)
        if self.append_slots.size:
            (slots,) = to_device([self.append_slots], self._kernels.device)
            keep_queries(query, layer.ring, slots)
        self.score_chunks(group, query)
        self._score_kept(group)

    def drop_tokens(self, layer: LayerState) -> None:
        self._drop(self._kernels.group(layer))


def append_slots(plan: StepPlan) -> IntArray:
    """``[tokens up to the last kept one]``, the ring's slot of each query of the batch, or -1."""
    slots = np.full(int(plan.append_tokens.max(initial=-1)) + 1, -1)
    slots[plan.append_tokens] = plan.append_slots
    return slots


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


def check_query(query: torch.Tensor, group: LayerGroup) -> None:
    """Raise KernelError unless ``query`` is ``[tokens, num_heads, head_size]`` as the group's rings are."""
    head_size = group.sizes["HEAD_SIZE"]
    if query.ndim != 3 or query.shape[1:] != (group.num_heads, head_size):
        raise KernelError("shape of query", tuple(query.shape), f"[tokens, {group.num_heads}, {head_size}]")
    if query.device != group.device:
        raise KernelError("device of query", query.device, f"{group.device}, as the cache")
    if query.dtype != group.first.ring.dtype:
        raise KernelError("dtype of query", query.dtype, f"{group.first.ring.dtype}, as the kept queries")
    if query.stride()[1:] != (head_size, 1):
        raise KernelError("strides of query", query.stride(), f"(any, {head_size}, 1)")
