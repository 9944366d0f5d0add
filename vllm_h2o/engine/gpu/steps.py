"""One KV cache group from step to step: what its kernels see, and what is left to do after them.

A step's work is spread over two calls of the metadata builder and the forward pass between them:

    build t       finish step t-1: score the queries it kept, drop tokens
                  plan step t, score what is pending before its chunks, reset the blocks that begin
                  live tables and lengths into buffers that stay
    forward t     per layer: attention, keep queries (also inside a CUDA graph), score chunks
    build t + 1   finish step t ...

Between forward t and build t + 1 nobody writes to a block: what the scheduler freed after step t belongs to
others from forward t + 1 on (vLLM zeroes or copies blocks before that in models with state-space layers and
in caches of mixed precision only, which are refused).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.device_plan import DeviceBatch, DevicePlanner
from vllm_h2o.engine.compat import Attention, CommonAttentionMetadata, VllmConfig, get_layers_from_vllm_config
from vllm_h2o.kernels.base import AttentionShape, LayerState
from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.prepare import TritonKernels, TritonStep, append_slots, keep_queries
from vllm_h2o.kernels.triton.upload import to_device
from vllm_h2o.layout import PagedLayer
from vllm_h2o.request_ring import RequestRing
from vllm_h2o.step_plan import IntArray


@dataclass(frozen=True)
class LayerWork:
    """What each layer of a group does after its attention kernel.

    Attributes:
        slots: ``[at most num_tokens]`` int32, the ring's slot of each query of the batch, or -1.
        step: whose chunks to score; None where there are none.
        alone: each layer as a group of its own, by name.
    """

    slots: torch.Tensor
    step: TritonStep | None
    alone: Mapping[str, LayerGroup]

    def run(self, layer_name: str, ring: torch.Tensor, query: torch.Tensor) -> None:
        """Keep and score queries.

        Args:
            ring: the layer's.
            query: ``[num_tokens or more, num_heads, head_size]``, as attention saw it.
        """
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()  # a token's heads have to lie side by side
        if self.slots.numel():
            keep_queries(query, ring, self.slots)
        if self.step is not None:
            self.step.score_chunks(self.alone[layer_name], query)


class LiveSteps:
    """The steps of one group; its layers get their rings here.

    Attributes:
        seq_lens: ``[max_num_seqs]`` int32, live tokens of each row.
        slots: ``[max_num_batched_tokens]`` int32, -1 behind the last query that is kept.
        table: ``[max_num_seqs, width of the runner's]`` int32, live blocks of each row, then ids that nobody
            may read. None before the first step. All three stay where they are, as CUDA graphs need it.
    """

    def __init__(
        self, policy: KVPolicyConfig, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        limits = vllm_config.scheduler_config
        self.policy = policy
        self.planner = DevicePlanner(policy, RequestRing(limits.max_num_seqs, policy.block_size))
        self.kernels = TritonKernels(policy, device)
        self.seq_lens = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)
        self.slots = torch.full((limits.max_num_batched_tokens,), -1, dtype=torch.int32, device=device)
        self.table: torch.Tensor | None = None
        self._device = device
        self._layers: dict[str, Any] = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self._group: LayerGroup | None = None
        self._alone: dict[str, LayerGroup] = {}
        self._unfinished: TritonStep | None = None

    def start(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, LayerWork | None]:
        """Finish the last step and begin the next one.

        Returns:
            What the kernels shall see, and what the layers do after them.
        """
        if self._is_dummy(common):
            return self.show_as_it_is(common), None
        self._finish()
        plan = self.planner.plan(batch := self._batch(common))
        kept = append_slots(plan)
        work = None
        if not plan.is_empty:
            step = self._unfinished = self.kernels.prepare(plan)
            step.start(self._layer_group())
            chunks = step if any(not rows.from_ring.all() for rows in plan.scores) else None
            if kept.size or chunks is not None:
                work = LayerWork(self.slots[: kept.size], chunks, self._alone)
        return self._show(common, batch, kept), work

    def capture(self, common: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, LayerWork | None]:
        """What a CUDA graph is captured with: nothing is planned; a replay keeps what ``slots`` says then."""
        work = None
        if self.policy.scores_attention:
            work = LayerWork(self.slots[: common.num_actual_tokens], None, {})
        return self.show_as_it_is(common), work

    def show_as_it_is(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The batch in our buffers, of rows that have lost nothing; no query is kept."""
        rows, table = common.num_reqs, self._buffer(common.block_table_tensor)
        self.slots.fill_(-1)
        self.seq_lens[:rows].copy_(common.seq_lens[:rows])
        table[:rows].copy_(common.block_table_tensor[:rows])
        return common.replace(block_table_tensor=table[:rows], seq_lens=self.seq_lens[:rows])

    def _finish(self) -> None:
        step, self._unfinished = self._unfinished, None
        if step is not None:
            step.finish(self._layer_group())

    def _batch(self, common: CommonAttentionMetadata) -> DeviceBatch:
        assert common.req_idx is not None, "only the V2 model runner numbers its requests"
        return self.planner.device_batch(
            # An upper bound only under speculative decoding, which is refused.
            common.seq_lens_cpu_upper_bound.numpy().astype(np.int64),
            common.query_start_loc_cpu.numpy().astype(np.int64),
            common.block_table_tensor,
            common.req_idx.astype(np.int64),
        )

    def _show(
        self, common: CommonAttentionMetadata, batch: DeviceBatch, kept: IntArray
    ) -> CommonAttentionMetadata:
        """Live table and shortened lengths. Positions and slot mapping stay logical."""
        rows, block_size = common.num_reqs, self.policy.block_size
        gap_tokens = batch.gap_blocks * block_size
        live_tokens = batch.total - gap_tokens
        longest = int(live_tokens.max())
        table = self._buffer(common.block_table_tensor)
        num_columns = -(-longest // block_size)
        table[:rows, :num_columns].copy_(batch.live_table.live(num_columns))
        gap_on_device, kept_on_device = to_device([gap_tokens, kept], self._device)
        torch.sub(common.seq_lens[:rows], gap_on_device, out=self.seq_lens[:rows])
        self.slots.fill_(-1)
        self.slots[: kept.size].copy_(kept_on_device)
        return common.replace(
            block_table_tensor=table[:rows],
            seq_lens=self.seq_lens[:rows],
            seq_lens_cpu_upper_bound=torch.from_numpy(live_tokens.astype(np.int32)),
            max_seq_len=longest,
            _num_computed_tokens_cache=None,
        )

    def _buffer(self, table: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = table.new_zeros(self.seq_lens.numel(), table.shape[1])
        return self.table

    def _is_dummy(self, common: CommonAttentionMetadata) -> bool:
        """Whether this is one of vLLM's runs without requests (warm-up, idle ranks), with zeroed tables.

        Its rows use the numbers of requests that may be running, so it must not be planned. Told by rows that
        have no context and yet aren't being prefilled, which no request is.
        """
        assert common.req_idx is not None and common.is_prefilling is not None
        rows = common.req_idx.size
        new = np.diff(common.query_start_loc_cpu[: rows + 1].numpy())
        computed = common.seq_lens_cpu_upper_bound[:rows].numpy() - new
        return bool(((computed == 0) & ~common.is_prefilling[:rows].numpy()).any())

    def _layer_group(self) -> LayerGroup:
        """Made when it is first needed: vLLM binds the caches after it makes the builders."""
        if self._group is None:
            states = [self._state(name, layer) for name, layer in self._layers.items()]
            self._group = LayerGroup.of(states)
            self._alone = {state.name: LayerGroup.of([state]) for state in states}
        return self._group

    def _state(self, name: str, layer: Any) -> LayerState:
        impl = layer.impl
        sinks = None if impl.sinks is None else impl.sinks.detach().float()
        return LayerState(
            name=name,
            cache=PagedLayer.from_gpu_cache(layer.kv_cache, positions=self.policy.tracks_positions),
            ring=impl.query_ring,
            shape=AttentionShape(impl.scale, float(impl.logits_soft_cap or 0), sinks),
        )
