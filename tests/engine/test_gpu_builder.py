"""The metadata builders for GPUs, driven as vLLM's V2 model runner drives them, on CPU.

Layers, specs, caches, groups, batches and `prepare_attn` are vLLM's own. What can't run without a GPU is
replaced: the launches of our kernels, which are recorded, and vLLM's attention kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.compilation import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import triton_attn
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import init_attn_backend, init_kv_cache
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from schedules import Schedule, Step
from tests.engines import MODEL
from tests.vllm_versions import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm_h2o.engine.gpu import steps as gpu_steps
from vllm_h2o.engine.gpu.backend import H2OFlashAttentionBackend, H2OTritonAttentionBackend
from vllm_h2o.engine.gpu.builder import WORK_ATTRIBUTE
from vllm_h2o.engine.spec import H2OSpec, evicting
from vllm_h2o.kernels.triton.layers import LayerGroup
from vllm_h2o.kernels.triton.prepare import TritonStep, check_query
from vllm_h2o.retention import evicted_blocks
from vllm_h2o.settings import KVPolicySettings

CPU = torch.device("cpu")
BLOCK, BUDGET, MAX_LEN, MAX_REQUESTS, MAX_TOKENS = 16, 64, 512, 6, 96
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 64
FULL, SLIDING = ["model.layers.0.attn", "model.layers.2.attn"], ["model.layers.1.attn", "model.layers.3.attn"]
NUM_BLOCKS = 120

BACKENDS = [
    pytest.param(H2OTritonAttentionBackend, id="TRITON_ATTN"),
    pytest.param(H2OFlashAttentionBackend, id="FLASH_ATTN"),
]


@dataclass
class Launches:
    """What was launched, in order: a word, and whose work it is."""

    log: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, word: str) -> list[Any]:
        return [what for name, what in self.log if name == word]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Our launches are recorded; keeping queries is done by torch."""
    launched = Launches()

    def record(word: str) -> Any:
        def method(step: TritonStep, group: LayerGroup, *args: torch.Tensor) -> None:
            launched.log.append((word, (step, [layer.name for layer in group.layers])))
            for query in args:
                check_query(query, group)

        return method

    for word in ("start", "score_chunks", "finish"):
        monkeypatch.setattr(TritonStep, word, record(word))

    def keep_queries(query: torch.Tensor, ring: torch.Tensor, slots: torch.Tensor) -> None:
        assert slots.numel() <= query.shape[0]
        kept = slots >= 0
        ring[slots[kept].long()] = query[: slots.numel()][kept]

    monkeypatch.setattr(gpu_steps, "keep_queries", keep_queries)
    return launched


class Runner:
    """The part of vLLM's V2 model runner that the builders meet."""

    def __init__(self, backend: Any, *, layout: str = "LBNHC", policy: dict[str, Any] | None = None) -> None:
        self.config: VllmConfig = EngineArgs(
            MODEL, max_model_len=MAX_LEN, max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS
        ).create_engine_config()
        settings = KVPolicySettings(**{"name": "h2o", "budget": BUDGET, **(policy or {})})
        self.policy, _ = settings.resolve(
            max_model_len=MAX_LEN, block_size=BLOCK, max_in_flight_tokens=MAX_TOKENS
        )
        # Afterwards: the CPU platform, where this runs, takes no blocks of this size.
        self.config.cache_config.block_size = BLOCK
        self.config.cache_config.kv_cache_layout = layout
        self.config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
        with set_current_vllm_config(self.config):
            self.layers = {
                name: Attention(
                    HEADS, HEAD_SIZE, 0.125, num_kv_heads=KV_HEADS, cache_config=self.config.cache_config,
                    per_layer_sliding_window=64 if name in SLIDING else None, prefix=name,
                    attn_backend=backend,
                )
                for name in sorted(FULL + SLIDING)
            }  # fmt: skip
            specs = {
                name: evicting(layer.get_kv_cache_spec(self.config), self.policy)
                for name, layer in self.layers.items()
            }
            self.kv_config: KVCacheConfig = get_kv_cache_config_from_groups(
                self.config, get_kv_cache_groups(self.config, specs), available_memory=0
            )
            self.groups, self.cudagraph_support, kernel_sizes = init_attn_backend(
                self.kv_config, self.config, CPU
            )
            init_kv_cache(self.layers, self.kv_config, CPU, kernel_sizes, self.config)
        self.evicting_group = next(
            i for i, (group,) in enumerate(self.groups) if isinstance(group.kv_cache_spec, H2OSpec)
        )
        # A little wider than needed, as vLLM's are.
        width = MAX_LEN // BLOCK + 4
        self.tables = [torch.zeros(MAX_REQUESTS, width, dtype=torch.int32) for _ in self.groups]
        self.buffers = InputBuffers(MAX_REQUESTS, MAX_TOKENS, CPU)
        self.state = SimpleNamespace(
            max_model_len=MAX_LEN, supports_mm_inputs=False, encoder_cache=None, model_config=None
        )

    @property
    def builder(self) -> Any:
        return self.groups[self.evicting_group][0].get_metadata_builder(0)

    def prepare(self, batch: InputBatch, mode: CUDAGraphMode, *, for_capture: bool = False) -> dict[str, Any]:
        """Metadata by layer."""
        full = mode == CUDAGraphMode.FULL
        rows = batch.num_reqs_after_padding if full else batch.num_reqs
        tables = tuple(table[:rows] for table in self.tables)
        tokens = batch.num_tokens_after_padding
        slot_mappings = torch.full((len(self.groups), tokens), -1, dtype=torch.int64)
        prepare_attn: Any = DefaultModelState.prepare_attn
        return prepare_attn(
            self.state, batch, mode, tables, slot_mappings, self.groups, self.kv_config, for_capture
        )

    def step(self, step: Step, *, full: bool = False, padding: int = 0) -> dict[str, Any]:
        """As `GPUModelRunner.prepare_inputs`, of decode rows padded for a graph, and of any rows without."""
        num_rows, num_tokens = len(step.requests), sum(step.new)
        batch = InputBatch.make_dummy(num_rows + padding, num_tokens + padding, self.buffers)
        new, totals = np.array(step.new, np.int32), np.array(step.totals, np.int32)
        starts = np.full(num_rows + padding + 1, num_tokens, np.int32)
        starts[: num_rows + 1] = np.concatenate([[0], np.cumsum(new)])
        lengths = np.zeros(num_rows + padding, np.int32)
        lengths[:num_rows] = totals
        self.buffers.query_start_loc[: starts.size].copy_(torch.from_numpy(starts))
        self.buffers.seq_lens[: lengths.size].copy_(torch.from_numpy(lengths))
        for table in self.tables:
            table[:num_rows, : step.table.shape[1]] = torch.from_numpy(step.table)
            table[num_rows : num_rows + padding] = 0
        batch.num_reqs, batch.num_tokens = num_rows, num_tokens
        batch.idx_mapping_np = np.array(step.requests, dtype=np.intp)
        batch.num_scheduled_tokens = new
        batch.query_start_loc_np = starts
        batch.seq_lens_cpu_upper_bound = torch.from_numpy(lengths)
        batch.is_prefilling_np = (totals == new) | (new > 1)
        batch.max_query_len = int(new.max())
        return self.prepare(batch, CUDAGraphMode.FULL if full else CUDAGraphMode.NONE)


@pytest.fixture(params=BACKENDS)
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(request.param)


def steps(runner: Runner, count: int, seed: int = 1) -> Iterator[Step]:
    schedule = Schedule(
        runner.policy, seed, max_requests=MAX_REQUESTS, num_blocks=NUM_BLOCKS, chunks=(1, 7, BLOCK)
    )
    for _ in range(count):
        step = schedule.step()
        if step.requests:
            yield step


def gaps(step: Step) -> list[int]:
    return [
        int(evicted_blocks(total - new, budget_tokens=BUDGET, block_size=BLOCK))
        for total, new in zip(step.totals, step.new, strict=True)
    ]


def test_kernels_see_live_blocks_in_buffers_that_stay(runner: Runner, launches: Launches) -> None:
    addresses = set()
    num_gaps = num_full = 0
    for step in steps(runner, 150):
        # Full graphs are of decode steps, and padded.
        full = max(step.new) == 1 and len(step.requests) < MAX_REQUESTS
        padding = MAX_REQUESTS - len(step.requests) if full else 0
        metadata = runner.step(step, full=full, padding=padding)[FULL[0]]
        rows = len(step.requests) + padding
        assert metadata.block_table.shape[0] == metadata.seq_lens.shape[0] == rows
        lengths = [total - gap * BLOCK for total, gap in zip(step.totals, gaps(step), strict=True)] + [
            0
        ] * padding
        assert metadata.seq_lens.tolist() == lengths
        assert metadata.max_seq_len == max(lengths)
        for row, (gap, length) in enumerate(zip(gaps(step), lengths, strict=False)):
            live = np.delete(step.table[row], np.s_[1 : 1 + gap])[: -(-length // BLOCK)]
            assert metadata.block_table[row, : live.size].tolist() == live.tolist()
        addresses.add((metadata.block_table.data_ptr(), metadata.seq_lens.data_ptr()))
        # A query that comes alone is kept, in its request's slot, where its token is in the block.
        kept = torch.full((MAX_TOKENS,), -1, dtype=torch.int32)
        for request, total, new, first in zip(
            step.requests, step.totals, step.new, np.cumsum([0, *step.new]), strict=False
        ):
            if new == 1:
                kept[first] = request * BLOCK + (total - 1) % BLOCK
        assert torch.equal(runner.builder.steps.slots, kept)
        addresses.add(runner.builder.steps.slots.data_ptr())
        # Starts stay logical.
        assert metadata.query_start_loc.data_ptr() == runner.buffers.query_start_loc.data_ptr()
        num_gaps += any(gaps(step))
        num_full += full
    assert len(addresses) == 2
    assert min(num_gaps, num_full) > 20
    assert runner.builder.steps.table.shape == runner.tables[0].shape


def test_layers_that_keep_everything_get_what_vllm_gives_them(runner: Runner, launches: Launches) -> None:
    for step in steps(runner, 60):
        metadata = runner.step(step)[SLIDING[0]]
        assert metadata.seq_lens.tolist() == step.totals
        assert metadata.max_seq_len == max(step.totals)
        assert metadata.block_table.data_ptr() in {table.data_ptr() for table in runner.tables}
        assert not hasattr(metadata, WORK_ATTRIBUTE)
    assert not hasattr(runner.layers[SLIDING[0]].impl, "query_ring")


@pytest.mark.parametrize("name", ["h2o", "keydiff"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_step_leaves_is_done_once_at_the_beginning_of_the_next(
    backend: Any, name: str, launches: Launches
) -> None:
    runner = Runner(backend, policy={"name": name})
    builds = []
    for step in steps(runner, 80):
        done_before = len(launches.log)
        runner.step(step)
        builds.append([word for word, _ in launches.log[done_before:]])
    # Under a policy without scores there are steps that begin nothing, and then leave nothing.
    for last, this in pairwise(builds):
        assert ("finish" in this) == ("start" in last)
        assert this in (["finish", "start"], ["finish"], ["start"], [])
    began, finished = launches.of("start"), launches.of("finish")
    assert len(began) > 20
    assert (len(began) == len(builds)) == (name == "h2o")
    assert len(began) - len(finished) <= 1
    assert finished == began[: len(finished)]
    assert all(names == FULL for _, names in began)


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_lie_in_memory_of_their_own(backend: Any, layout: str, launches: Launches) -> None:
    """In every layout that the backends take, behind what attention reads."""
    assert layout in {member.name for member in backend.supported_kv_cache_layouts()}
    runner = Runner(backend, layout=layout)
    runner.step(Step([0], [5], [5], np.ones((1, 1), np.int32)))
    group = runner.builder.steps._layer_group()
    assert [layer.name for layer in group.layers] == FULL
    for i, layer in enumerate(group.layers):
        own = runner.layers[layer.name].kv_cache
        assert own.shape == (NUM_BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
        assert layer.cache.keys.data_ptr() == own.data_ptr()
        assert layer.cache.values.data_ptr() == own[..., HEAD_SIZE:].data_ptr()
        layer.cache.scores.fill_(i + 1)
        assert layer.cache.positions is not None
        layer.cache.positions.fill_(-i - 1)
    for name in FULL:
        assert not runner.layers[name].kv_cache.any(), "scores in keys and values"
    for i, layer in enumerate(group.layers):
        for name in FULL:
            runner.layers[name].kv_cache.fill_(3.0)
        assert (layer.cache.scores == i + 1).all()
        assert (layer.cache.positions == -i - 1).all()


def test_capturing_plans_nothing(runner: Runner, launches: Launches) -> None:
    kept = next(step for step in steps(runner, 80) if max(step.new) == 1)
    runner.step(kept)
    begun = list(launches.log)
    ring = runner.builder.steps.planner.ring
    before = ring._next.copy()
    batch = InputBatch.make_dummy(4, 4, runner.buffers)
    captured = runner.prepare(batch, CUDAGraphMode.NONE, for_capture=True)[FULL[0]]
    assert launches.log == begun
    np.testing.assert_array_equal(ring._next, before)
    assert captured.max_seq_len == MAX_LEN, "the worst case, as vLLM says"
    work = getattr(captured, WORK_ATTRIBUTE)
    assert work.step is None
    assert work.slots.tolist() == [-1] * 4
    # What was captured reads what later steps write.
    real = runner.step(kept)[FULL[0]]
    assert work.slots.data_ptr() == runner.builder.steps.slots.data_ptr()
    assert captured.seq_lens.data_ptr() == real.seq_lens.data_ptr()
    assert captured.block_table.data_ptr() == real.block_table.data_ptr()
    assert (work.slots[: len(kept.new)] >= 0).all()
    assert (runner.builder.steps.slots[len(kept.new) :] == -1).all()


@pytest.mark.parametrize("mode", ["eager", "full"])
def test_runs_without_requests_touch_none(runner: Runner, launches: Launches, mode: str) -> None:
    """Idle data-parallel ranks run along with made-up rows that have the numbers of running requests."""
    for step in steps(runner, 40):
        runner.step(step)
    begun = list(launches.log)
    ring = runner.builder.steps.planner.ring
    before = ring._next.copy(), ring._first.copy()
    for table in runner.tables:
        table.zero_()
    full = mode == "full"
    batch = InputBatch.make_dummy(MAX_REQUESTS, MAX_REQUESTS + (not full), runner.buffers)
    metadata = runner.prepare(batch, CUDAGraphMode.FULL if full else CUDAGraphMode.NONE, for_capture=full)[
        FULL[0]
    ]
    assert launches.log == begun
    np.testing.assert_array_equal((ring._next, ring._first), before)
    assert not metadata.block_table.any()
    assert (runner.builder.steps.slots == -1).all()
    assert full or getattr(metadata, WORK_ATTRIBUTE) is None


def test_chunks_stay_out_of_full_graphs(runner: Runner) -> None:
    assert runner.cudagraph_support.min_cg_support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    for (group,) in runner.groups:
        support = group.get_metadata_builder(0).get_cudagraph_support(runner.config, group.kv_cache_spec)
        decode_only = isinstance(group.kv_cache_spec, H2OSpec)
        assert (support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE) == decode_only


def test_policies_without_scores_keep_no_queries(launches: Launches) -> None:
    runner = Runner(H2OTritonAttentionBackend, policy={"name": "streaming"})
    for step in steps(runner, 60):
        metadata = runner.step(step)[FULL[0]]
        assert getattr(metadata, WORK_ATTRIBUTE) is None
        assert metadata.seq_lens.tolist() == [
            total - gap * BLOCK for total, gap in zip(step.totals, gaps(step), strict=True)
        ]
    assert launches.log == []
    batch = InputBatch.make_dummy(4, 4, runner.buffers)
    captured = runner.prepare(batch, CUDAGraphMode.NONE, for_capture=True)[FULL[0]]
    assert getattr(captured, WORK_ATTRIBUTE) is None
    assert runner.layers[FULL[0]].impl.query_ring.numel() == 0


def test_layers_keep_and_score_what_attention_saw(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries come as views of a wider tensor, with rows of padding behind, or head by head."""
    monkeypatch.setattr(
        triton_attn, "unified_attention", lambda **_: launches.log.append(("attention", None))
    )
    runner = Runner(H2OTritonAttentionBackend)
    layer = runner.layers[FULL[1]]
    # Request 3 decodes its sixth token, 1 has a chunk.
    table = np.array([[4, 0], [5, 6]], np.int32)
    runner.step(Step([3, 1], [5, 4], [5, 4], table))
    metadata = runner.step(Step([3, 1], [6, 20], [1, 16], table))
    fused = torch.randn(24, HEADS * HEAD_SIZE + 2 * KV_HEADS * HEAD_SIZE)
    query = fused[:, : HEADS * HEAD_SIZE].view(24, HEADS, HEAD_SIZE).to(layer.impl.query_ring.dtype)
    output = torch.zeros(24, HEADS, HEAD_SIZE, dtype=query.dtype)
    launches.log.clear()

    def forward(of_layer: Any, query: torch.Tensor = query) -> Any:
        return layer.impl.forward(
            layer, query, query, query, layer.kv_cache, of_layer, output=output, output_scale=None,
            output_block_scale=None,
        )  # fmt: skip

    assert forward(metadata[FULL[1]]) is output
    assert [word for word, _ in launches.log] == ["attention", "score_chunks"]
    assert launches.of("score_chunks")[0][1] == [FULL[1]]
    kept = 3 * BLOCK + 5
    assert torch.equal(layer.impl.query_ring[kept], query[0])
    layer.impl.query_ring[kept] = 0
    assert not layer.impl.query_ring.any()
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    assert by_head.stride() != query.stride()
    forward(metadata[FULL[1]], by_head)
    assert torch.equal(layer.impl.query_ring[kept], query[0])
    launches.log.clear()
    forward(None)
    assert launches.log == [], "a profiling run does nothing"
