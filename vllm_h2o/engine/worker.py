"""CPU worker under a KV policy."""

from typing import Any

# Not in compat: importing vLLM's worker starts its CPU runtime, which only a worker process may do.
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_h2o import query_ring
from vllm_h2o.engine.builder import H2OCPUMetadataBuilder
from vllm_h2o.engine.compat import WORKER_SEAMS
from vllm_h2o.engine.policy_worker import PolicyWorker


class H2OCPUWorker(PolicyWorker, CPUWorker):
    """``CPUWorker`` under a KV policy."""

    seams = WORKER_SEAMS

    @staticmethod
    def num_ring_slots(max_num_seqs: int) -> int:
        return query_ring.num_ring_slots(max_num_seqs)

    def take_kv_trace(self) -> list[dict[str, list[Any]]]:
        """What ``trace`` recorded since the last call, one entry per KV cache group (debugging)."""
        builders = [
            builder
            for groups in self.model_runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        return [
            builder.planner.trace.take()
            for builder in builders
            if isinstance(builder, H2OCPUMetadataBuilder)
            and builder.planner is not None
            and builder.planner.trace is not None
        ]
