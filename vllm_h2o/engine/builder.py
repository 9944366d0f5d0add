"""Metadata builder: shows kernels only live blocks, and plans what the layers do after attention."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_h2o.engine.compat import (
    AttentionSpec,
    CommonAttentionMetadata,
    CPUAttentionMetadataBuilder,
    VllmConfig,
    init_logger,
)
from vllm_h2o.engine.memory import allocate_rings, num_ring_queries
from vllm_h2o.engine.spec import H2OSpec
from vllm_h2o.kernels import create as create_kernels
from vllm_h2o.kernels.base import LayerState, PreparedStep
from vllm_h2o.layout import CPU_ISAS
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing, num_ring_slots
from vllm_h2o.request_limits import RowLimits
from vllm_h2o.step_plan import Batch, StepPlan
from vllm_h2o.trace import TraceLog

logger = init_logger("vllm.h2o.builder")

PLAN_ATTRIBUTE = "kv_policy_work"
"""Attribute of the wrapped backend's metadata that carries the ``StepWork`` to the layers."""


@dataclass
class WorkSeconds:
    """Time that layers have spent since it was last looked at."""

    scoring: float = 0.0
    compaction: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """What every evicting layer does after its attention kernel in this step."""

    plan: StepPlan
    prepared: PreparedStep
    seconds: WorkSeconds

    def run(self, layer: LayerState, query: torch.Tensor) -> None:
        began = time.perf_counter()
        self.prepared.update_scores(layer, query)
        scored = time.perf_counter()
        if self.plan.scores:  # else queries were kept, no more
            self.seconds.scoring += scored - began
        if self.plan.drops is not None:
            self.prepared.drop_tokens(layer)
            self.seconds.compaction += time.perf_counter() - scored
        if self.plan.trace is not None and self.plan.drops is not None:
            drops = self.plan.drops
            kept_blocks = drops.kept_blocks(layer.cache.block_size)
            kept_tokens = (drops.num_live - drops.num_dropped).tolist()
            self.plan.trace.add_compaction(
                layer.name, layer.cache, kept_blocks, kept_tokens, self.plan.trace_steps
            )


class H2OCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """vLLM's CPU builder; groups whose spec isn't ours (sliding window) pass through it untouched.

    Attributes:
        planner: None in such groups.
        row_limits: limits of the rows of the step that is being built; the worker sets it.
        seconds: what the layers have spent in steps that aren't reported yet.
    """

    isa: str

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.planner: StepPlanner | None = None
        self.row_limits: Callable[[], RowLimits | None] = lambda: None
        if not isinstance(kv_cache_spec, H2OSpec):
            return
        assert self.isa in CPU_ISAS, self.isa
        policy = kv_cache_spec.policy
        num_slots = num_ring_slots(vllm_config.scheduler_config.max_num_seqs)
        num_queries = num_ring_queries(policy, num_slots)
        allocate_rings(vllm_config, layer_names, num_queries, device)
        self.planner = StepPlanner(
            policy,
            QueryRing(num_queries // policy.block_size, policy.block_size),
            TraceLog() if policy.trace else None,
        )
        self.kernels = create_kernels(policy)
        self.seconds = WorkSeconds()
        self._lost_queries_logged = 0

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """vLLM's metadata for the live blocks, with the step's plan attached."""
        if self.planner is None:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        batch = self.planner.batch(
            # An upper bound only under speculative decoding, which is refused.
            common_attn_metadata.seq_lens_cpu_upper_bound.numpy().astype(np.int64),
            common_attn_metadata.query_start_loc_cpu.numpy().astype(np.int64),
            common_attn_metadata.block_table_tensor.numpy(),
            self.row_limits(),
        )
        plan = self.planner.plan(batch)
        if batch.has_gap:
            common_attn_metadata = self._without_gap(common_attn_metadata, batch)
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not plan.is_empty:
            setattr(metadata, PLAN_ATTRIBUTE, StepWork(plan, self.kernels.prepare(plan), self.seconds))
        self._report_lost_queries()
        return metadata

    def take_seconds(self) -> WorkSeconds:
        """What the layers spent since the last call."""
        taken, self.seconds = self.seconds, WorkSeconds()
        return taken

    def _without_gap(self, common: CommonAttentionMetadata, batch: Batch) -> CommonAttentionMetadata:
        """Live table and shortened lengths. Positions and slot mapping stay logical."""
        gap_tokens = torch.from_numpy(batch.gap_blocks * self.block_size).to(common.seq_lens.dtype)
        seq_lens = common.seq_lens - gap_tokens
        assert common.seq_lens_cpu_upper_bound is not None
        return common.replace(
            block_table_tensor=torch.from_numpy(np.ascontiguousarray(batch.live_table)),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound - gap_tokens,
            max_seq_len=int(seq_lens.max()),
            _num_computed_tokens_cache=None,
        )

    def _report_lost_queries(self) -> None:
        assert self.planner is not None
        lost = self.planner.ring.lost_queries
        if lost > self._lost_queries_logged:
            logger.warning(
                "KV policy: %d decode queries were not scored so far, because more requests ended while "
                "theirs was paused than there are query slots; raise --max-num-seqs to get more slots.",
                lost,
            )
            self._lost_queries_logged = lost
