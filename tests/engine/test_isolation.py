"""A request's output depends on nothing but itself, whatever else shares the batch and the pool.

Prompts fit one chunk and are added when no other prompt is being computed, so that batched and solo runs
have the same steps; only rows, blocks and neighbours differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm import LLM

from tests.engines import engine
from tests.stepping import Stepper, solo
from tests.tiny_models import random_prompt, save

POLICY: dict[str, Any] = {"budget": 128, "score_half_life": 64.0, "score_pool": 3}


@pytest.fixture(scope="module", params=["token", "block"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with engine(
        str(save("llama-gqa", tmp_path_factory.mktemp("models"))),
        policy={**POLICY, "granularity": request.param},
        skip_tokenizer_init=True,
        max_num_batched_tokens=1024,
        num_gpu_blocks_override=50,
        enable_prefix_caching=False,
    ) as llm:
        yield llm


def test_worker_keeps_no_freed_block(llm: LLM) -> None:
    """B starts in the blocks that A has just lost; both are as if alone."""
    prompt_a, prompt_b = random_prompt(120, seed=1), random_prompt(400, seed=2)
    alone_a, alone_b = solo(llm, prompt_a, 150), solo(llm, prompt_b, 60)
    stepper = Stepper(llm)
    stepper.add("a", prompt_a, 150)
    for _ in range(20):
        stepper.step()
    assert any(block.is_null for block in stepper.blocks_of("a")), "A has lost no block, nothing is tested"
    stepper.add("b", prompt_b, 60)
    tokens = stepper.run()
    assert tokens == {"a": alone_a, "b": alone_b}


def test_staggered_finishes_and_aborts(llm: LLM) -> None:
    """Rows swap and condense as neighbours end at different times, some of them aborted."""
    prompts = {f"r{i}": random_prompt(40 + 37 * i, seed=i) for i in range(8)}
    lengths = {f"r{i}": (4, 200, 33, 97, 150, 64, 12, 180)[i] for i in range(8)}
    alone = {name: solo(llm, prompts[name], lengths[name]) for name in prompts}
    stepper = Stepper(llm)
    free = stepper.free_blocks
    for i, name in enumerate(prompts):
        stepper.add(name, prompts[name], lengths[name])
        victim = f"aborted-{i}"
        stepper.add(victim, random_prompt(50 + 20 * i, seed=100 + i), 300)
        for _ in range(5):
            stepper.step()
        stepper.abort(victim)
    tokens = stepper.run()
    assert {name: tokens[name] for name in prompts} == alone
    stepper.assert_idle(free)


def test_neighbours_of_preempted_requests(llm: LLM) -> None:
    """Who is preempted is recomputed in other chunks; all others are as if alone.

    Short prompts are all admitted, then grow to their budgets, which the pool cannot hold.
    """
    names = [f"r{i}" for i in range(15)]
    prompts = {name: random_prompt(40 + i, seed=i) for i, name in enumerate(names)}
    alone = {name: solo(llm, prompts[name], 150) for name in names}
    stepper = Stepper(llm)
    free = stepper.free_blocks
    preempted: set[str] = set()

    def watch() -> None:
        for request in stepper.scheduler.requests.values():
            if request.num_preemptions:
                preempted.add(request.request_id.rsplit("-", 1)[0])

    for name in names:
        stepper.add(name, prompts[name], 150)
        stepper.step()
        watch()
    tokens = stepper.run(watch)
    assert preempted, "the pool was not tight enough to test anything"
    others = [name for name in names if name not in preempted]
    assert len(others) >= 5
    for name in others:
        assert tokens[name] == alone[name]
    stepper.assert_idle(free)


def _poison(layer_cache: torch.Tensor, block_id: int, kv: float) -> None:
    """``kv`` in a float32 block's K and V, NaN in the scores and positions behind them."""
    raw = torch.empty(0, dtype=torch.float32).set_(layer_cache.untyped_storage())
    first = int(layer_cache.storage_offset()) + block_id * layer_cache.stride(0)
    raw[first : first + layer_cache.stride(0)] = torch.nan
    layer_cache[block_id] = kv


def test_null_block_poisoned(llm: LLM) -> None:
    prompt = random_prompt(300, seed=3)
    clean = solo(llm, prompt, 150)
    stepper = Stepper(llm)
    for layer_cache in stepper.runner.kv_caches:
        _poison(layer_cache, 0, torch.nan)
    assert solo(llm, prompt, 150) == clean
    assert torch.isnan(stepper.runner.kv_caches[0][0]).all(), "block 0 was written"


def test_free_blocks_poisoned(llm: LLM) -> None:
    """What earlier owners left in K, V and scores of a block does not matter.

    K and V get finite garbage: NaN in the unused end of a tail block breaks plain vLLM's kernel, too.
    """
    prompt = random_prompt(300, seed=4)
    clean = solo(llm, prompt, 150)
    stepper = Stepper(llm)
    for layer_cache in stepper.runner.kv_caches:
        for block_id in range(1, layer_cache.shape[0]):
            _poison(layer_cache, block_id, 1e4)
    assert solo(llm, prompt, 150) == clean


def test_stale_table_tail(llm: LLM) -> None:
    """Random ids past every row's blocks, as a table keeps them from rows long gone."""
    prompt = random_prompt(90, seed=5)
    clean = solo(llm, prompt, 150)
    stepper = Stepper(llm)
    table = stepper.runner.input_batch.block_table[0].block_table.np
    table[:] = np.random.default_rng(0).integers(1, 50, table.shape)
    stepper.add("a", prompt, 150)
    stepper.add("b", random_prompt(200, seed=6), 100)
    assert stepper.run()["a"] == clean
