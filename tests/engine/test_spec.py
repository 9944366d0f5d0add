"""The spec of evicting layers, as vLLM's grouping asks it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from tests.vllm_versions import is_kv_cache_spec_uniform
from vllm_h2o.engine.spec import H2OSpec, evicting
from vllm_h2o.layout import side_bytes_per_block
from vllm_h2o.settings import KVPolicySettings

POLICY, _ = KVPolicySettings(name="h2o", budget=256, score_pool=3).resolve(
    max_model_len=2048, block_size=32, max_in_flight_tokens=256
)
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64
)


def test_blocks_have_room_for_scores_and_positions() -> None:
    spec = evicting(FULL, POLICY)
    assert isinstance(spec, H2OSpec)
    side = side_bytes_per_block(2, 32, positions=True)
    assert spec.page_size_bytes == FULL.page_size_bytes + side
    # vLLM pads and scales specs to make pages equal; the room for scores must follow.
    assert replace(spec, page_size_padded=1).page_size_bytes == spec.page_size_bytes
    assert replace(spec, block_size=64).page_size_bytes == 2 * spec.page_size_bytes


def test_other_layers_keep_their_specs() -> None:
    assert evicting(SLIDING, POLICY) is SLIDING
    windowed = replace(FULL, sliding_window=64)
    assert evicting(windowed, POLICY) is windowed
    unlimited = replace(POLICY, budget_tokens=4096)
    assert evicting(FULL, unlimited) is FULL


@pytest.mark.parametrize("first", [0, 1], ids=["full-first", "other-first"])
def test_mixed_layers_are_not_uniform(first: int) -> None:
    """vLLM finds out by merging; whichever comes first, the answer must be no, not an error."""
    ours = evicting(FULL, POLICY)
    for other in (SLIDING, evicting(replace(FULL, num_kv_heads=4), POLICY)):
        pair = [ours, other] if first == 0 else [other, ours]
        assert not is_kv_cache_spec_uniform({"a": pair[0], "b": pair[1]})
    assert is_kv_cache_spec_uniform({"a": ours, "b": evicting(FULL, POLICY)})
