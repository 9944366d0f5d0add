"""Looks between two steps at all that an engine keeps about its requests, and fails if it doesn't agree."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from tests.stepping import Stepper
from vllm_h2o.layout import PagedLayer


def check_integrity(stepper: Stepper, layer_index: int = 0) -> None:
    """Free list, reference counts, gaps, sums of usage, the worker's tables, and one layer's scores.

    For one KV cache group without prefix caching, or with it (blocks may then be shared).
    """
    scheduler, manager = stepper.scheduler, stepper.manager
    pool, policy = manager.block_pool, manager.policy
    tables: dict[str, list[Any]] = dict(manager.req_to_blocks)

    # Every block is free, or held by as many requests as it counts; the null block is nobody's.
    held = Counter(block.block_id for table in tables.values() for block in table if not block.is_null)
    for block in pool.blocks:
        if not block.is_null:
            assert block.ref_cnt == held[block.block_id], f"block {block.block_id}"
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(held)

    # What the rule says is gone is gone, and nothing else.
    live = logical = over_budget = 0
    assert set(manager.usage._requests) <= set(tables)
    for request_id, (computed, evicted) in manager.usage._requests.items():
        limits = manager.requests.of(request_id)
        gone = limits.evicted_blocks(computed, policy.block_size)
        assert evicted == gone * policy.block_size
        nulls = [i for i, block in enumerate(tables[request_id]) if block.is_null]
        assert nulls == list(range(limits.pinned_blocks, limits.pinned_blocks + gone)), request_id
        # Shared are only blocks that never change.
        for i, block in enumerate(tables[request_id]):
            assert block.is_null or block.ref_cnt == 1 or i < policy.pinned_blocks
        logical, live = logical + computed, live + computed - evicted
        over_budget += evicted > 0
    usage = manager.usage
    assert (usage.logical_tokens, usage.live_tokens) == (logical, live)
    assert usage.requests_over_budget == over_budget

    # Limits are remembered of requests that exist, on both sides.
    assert set(manager.requests._limits) <= set(scheduler.requests)
    _check_worker(stepper, tables, layer_index)


def _check_worker(stepper: Stepper, tables: dict[str, list[Any]], layer_index: int) -> None:
    runner, manager = stepper.runner, stepper.manager
    batch = runner.input_batch
    logical = batch.block_table[0].block_table.cpu
    blocks: set[int] = set()
    for row, request_id in enumerate(batch.req_ids):
        if request_id not in tables:  # ended or preempted; the worker hears of it in the next step
            continue
        mine = [block.block_id for block in tables[request_id]]
        for i, block in enumerate(tables[request_id][: int(batch.block_table[0].num_blocks_per_row[row])]):
            assert block.is_null or logical[row, i] == mine[i], f"{request_id}, block {i}"
        blocks.update(block.block_id for block in tables[request_id] if not block.is_null)
    if not blocks:
        return
    context = runner.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if getattr(layer.impl, "query_ring", None) is not None]
    layer = layers[layer_index % len(layers)]
    tracked = manager.policy.tracks_positions
    views = PagedLayer.from_cpu_cache(layer.kv_cache, isa=layer.isa, positions=tracked)
    assert torch.isfinite(views.scores[sorted(blocks)]).all()
    if views.positions is not None:
        # Pinned blocks, shared or not, hold the first positions in order, in every head.
        for table in tables.values():
            for i, block in enumerate(table[: manager.policy.pinned_blocks]):
                if block.block_hash is not None:
                    first = i * manager.policy.block_size
                    expected = torch.arange(first, first + manager.policy.block_size)
                    assert (views.positions[block.block_id] == expected).all()
