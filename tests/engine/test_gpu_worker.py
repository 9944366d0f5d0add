"""The GPU worker's figures, without a GPU: what it takes off the memory that vLLM finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu_worker import Worker

from tests.engines import MODEL
from vllm_h2o.engine.gpu.backend import H2OTritonAttentionBackend
from vllm_h2o.engine.gpu.worker import H2OGPUWorker
from vllm_h2o.engine.spec import H2OSpec
from vllm_h2o.errors import ConfigError
from vllm_h2o.settings import KVPolicySettings

NAMES = ["model.layers.0.attn", "model.layers.1.attn"]
BLOCK, MAX_LEN, MAX_REQUESTS, MAX_TOKENS, HEADS, HEAD_SIZE = 16, 1024, 8, 128, 4, 64
RINGS = len(NAMES) * MAX_REQUESTS * BLOCK * HEADS * HEAD_SIZE * torch.bfloat16.itemsize


def worker(available: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> H2OGPUWorker:
    """One that has loaded its model; vLLM's own would have set up a device."""
    monkeypatch.setattr(Worker, "determine_available_memory", lambda _: available)
    made = H2OGPUWorker.__new__(H2OGPUWorker)
    made.vllm_config = EngineArgs(
        MODEL, max_model_len=MAX_LEN, max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS
    ).create_engine_config()
    made.vllm_config.cache_config.block_size = BLOCK
    given = KVPolicySettings(**{"name": "h2o", "budget": 128, "kernels": "triton", **settings})
    made.kv_policy, _ = given.resolve(
        max_model_len=MAX_LEN, block_size=BLOCK, max_in_flight_tokens=MAX_TOKENS
    )
    made.device = torch.device("cpu")
    made.is_driver_worker = True
    with set_current_vllm_config(made.vllm_config):
        layers = {
            name: Attention(
                HEADS, HEAD_SIZE, 0.125, num_kv_heads=2, cache_config=made.vllm_config.cache_config,
                prefix=name, attn_backend=H2OTritonAttentionBackend,
            )
            for name in NAMES
        }  # fmt: skip
    specs = {name: layer.get_kv_cache_spec(made.vllm_config) for name, layer in layers.items()}
    made.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: specs)
    return made


def test_rings_and_scratch_are_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(1 << 30, monkeypatch)
    assert all(isinstance(spec, H2OSpec) for spec in one.get_kv_cache_spec().values())
    scratch = one.scratch_bytes(NAMES)
    assert one.determine_available_memory() == (1 << 30) - RINGS - scratch
    # Logarithms of all kept queries at once, buffers that stay, and room for a compaction.
    logarithms = 4 * HEADS * len(NAMES) * MAX_REQUESTS * BLOCK
    buffers = 4 * (MAX_REQUESTS * (MAX_LEN // BLOCK + 1) + MAX_TOKENS)
    assert scratch == logarithms + buffers + (64 << 20)
    assert one.kernels.name == "triton"


def test_policies_without_scores_have_no_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    one = worker(1 << 30, monkeypatch, name="streaming")
    assert one.determine_available_memory() == (1 << 30) - one.scratch_bytes(NAMES)


def test_too_many_requests_for_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = worker(1 << 30, monkeypatch).scratch_bytes(NAMES)
    available = RINGS // 2 + scratch
    with pytest.raises(ConfigError, match=r"--max-num-seqs=8: kept queries need .* MiB and scoring"):
        worker(available, monkeypatch).determine_available_memory()


def test_blocks_of_another_size_than_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known only after the model is loaded: some kernels want blocks of one size."""
    one = worker(1 << 30, monkeypatch)
    one.vllm_config.cache_config.block_size = 128
    with pytest.raises(ConfigError, match=r"--block-size=16: .* blocks of 128 .* Give --block-size 128"):
        one.get_kv_cache_spec()
    unlimited = worker(1 << 30, monkeypatch, budget=MAX_LEN)
    unlimited.vllm_config.cache_config.block_size = 128
    assert not any(isinstance(spec, H2OSpec) for spec in unlimited.get_kv_cache_spec().values())


def test_caches_whose_blocks_are_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(Worker, "initialize_from_config", lambda _, config: called.append(config))
    one = worker(1 << 30, monkeypatch)
    fine = SimpleNamespace(needs_kv_cache_zeroing=False)
    one.initialize_from_config(fine)
    assert called == [fine]
    with pytest.raises(AssertionError):
        one.initialize_from_config(SimpleNamespace(needs_kv_cache_zeroing=True))
