"""CPU worker under a KV policy."""

from typing import Any

import torch

# Not in compat: importing vLLM's worker starts its CPU runtime, which only a worker process may do.
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_h2o import query_ring
from vllm_h2o.engine.builder import H2OCPUMetadataBuilder, WorkSeconds
from vllm_h2o.engine.compat import Attention, ModelRunnerOutput, get_layers_from_vllm_config
from vllm_h2o.engine.policy_worker import PolicyWorker
from vllm_h2o.engine.seams import WORKER_SEAMS
from vllm_h2o.engine.spec import H2OSpec
from vllm_h2o.layout import PagedLayer
from vllm_h2o.request_limits import RequestTable, RowLimits
from vllm_h2o.usage import SECONDS_ATTRIBUTE


class H2OCPUWorker(PolicyWorker, CPUWorker):
    """``CPUWorker`` under a KV policy."""

    seams = WORKER_SEAMS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.requests = RequestTable(self.kv_policy)

    @staticmethod
    def num_ring_slots(max_num_seqs: int) -> int:
        return query_ring.num_ring_slots(max_num_seqs)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """As vLLM's; then the builders exist, which have to know the requests behind their rows."""
        super().initialize_from_config(kv_cache_config)
        self._views = self._layer_views()
        for builder in self._builders():
            builder.row_limits = self._row_limits

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's; the output says what the layers spent on the policy."""
        self.requests.forget(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            params = request.sampling_params
            extra_args = None if params is None else params.extra_args
            ids, embeds = request.prompt_token_ids, request.prompt_embeds
            self.requests.add(request.req_id, extra_args, len(embeds if ids is None else ids))
        if copies := scheduler_output.kv_cache_block_copies:
            sources, copied = torch.tensor(copies).unbind(1)
            for views in self._views:
                views.copy_side(sources, copied, scores=not self.kv_policy.scores_attention)
        return self._with_seconds(super().execute_model(scheduler_output, *args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """As ``execute_model``: one of the two returns the step's output."""
        return self._with_seconds(super().sample_tokens(*args, **kwargs))

    def _with_seconds(self, output: Any) -> Any:
        # vLLM's output without requests is one object for all steps.
        if isinstance(output, ModelRunnerOutput) and output.req_ids:
            spent = [builder.take_seconds() for builder in self._builders()]
            total = WorkSeconds(sum(s.scoring for s in spent), sum(s.compaction for s in spent))
            setattr(output, SECONDS_ATTRIBUTE, (total.scoring, total.compaction))
        return output

    def _row_limits(self) -> RowLimits | None:
        """Of the batch that is being prepared: its rows are in the runner's order."""
        return self.requests.rows(self.model_runner.input_batch.req_ids) if len(self.requests) else None

    def kv_policy_requests(self) -> list[tuple[int, int]]:
        """Live and evicted tokens of each request in the runner's batch, as of its last step."""
        batch = self.model_runner.input_batch
        found = []
        for request_id, computed in zip(batch.req_ids, batch.num_computed_tokens_cpu.tolist(), strict=False):
            block_size = self.kv_policy.block_size
            evicted = self.requests.of(request_id).evicted_blocks(computed, block_size) * block_size
            found.append((computed - evicted, evicted))
        return found

    def take_kv_trace(self) -> list[dict[str, list[Any]]]:
        """What ``trace`` recorded since the last call, one entry per KV cache group (debugging)."""
        traces = [builder.planner.trace for builder in self._builders() if builder.planner is not None]
        return [trace.take() for trace in traces if trace is not None]

    def _layer_views(self) -> list[PagedLayer]:
        """Of the evicting layers whose blocks have something beside keys and values."""
        if not self.kv_policy.compacts:
            return []
        evicting = [name for name, spec in self.get_kv_cache_spec().items() if isinstance(spec, H2OSpec)]
        layers = get_layers_from_vllm_config(self.vllm_config, Attention, evicting)
        tracked = self.kv_policy.tracks_positions
        return [
            PagedLayer.from_cpu_cache(layer.kv_cache, isa=layer.isa, positions=tracked)
            for layer in layers.values()
        ]

    def _builders(self) -> list[H2OCPUMetadataBuilder]:
        """Of the groups that evict."""
        builders = [
            builder
            for groups in self.model_runner.attn_groups
            for group in groups
            for builder in group.metadata_builders
        ]
        return [b for b in builders if isinstance(b, H2OCPUMetadataBuilder) and b.planner is not None]
