"""What holds for every policy: weights and decay are one and the same sum, however it is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h2o import policies
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.policies.base import Policy
from vllm_h2o.settings import KVPolicySettings

HALF_LIVES = [None, 0.5, 32.0, 1e5]


def create(name: str, half_life: float | None) -> Policy:
    settings_ = KVPolicySettings(name=name, budget=512, score_half_life=half_life)
    config, _ = settings_.resolve(max_model_len=2048, block_size=32, max_in_flight_tokens=512)
    return policies.create(config)


@pytest.fixture(params=[(name, half_life) for name in policies.names() for half_life in HALF_LIVES])
def policy(request: pytest.FixtureRequest) -> Policy:
    return create(*request.param)


def test_weights_are_float32_of_any_shape(policy: Policy) -> None:
    ages = np.arange(6, dtype=np.int64).reshape(2, 3)
    for array in (policy.query_weights(ages), policy.decay(ages)):
        assert array.dtype == np.float32
        assert array.shape == (2, 3)
        assert ((array >= 0) & (array <= 1)).all()


def test_the_newest_query_counts_in_full_and_no_query_decays_nothing(policy: Policy) -> None:
    assert policy.query_weights(np.array([0])).tolist() == [1]
    assert policy.decay(np.array([0])).tolist() == [1]


def test_older_queries_never_count_more(policy: Policy) -> None:
    assert (np.diff(policy.query_weights(np.arange(10_000))) <= 0).all()


@settings(deadline=None, max_examples=30)
@given(
    received=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    half_life=st.sampled_from(HALF_LIVES),
    name=st.sampled_from(policies.names()),
)
def test_scoring_in_parts_equals_scoring_at_once(
    received: list[float], cut: int, half_life: float | None, name: str
) -> None:
    """Prefill chunks, whole tail blocks and early flushes may cut the queries anywhere."""
    policy = create(name, half_life)

    def add(score: float, part: list[float]) -> float:
        ages = np.arange(len(part))[::-1]
        return float(score * policy.decay(np.array(len(part))) + policy.query_weights(ages) @ np.array(part))

    in_parts = add(add(0.0, received[:cut]), received[cut:])
    assert in_parts == pytest.approx(add(0.0, received), rel=1e-4, abs=1e-6)


def test_half_life_by_hand() -> None:
    policy = create("h2o", 32.0)
    assert policy.query_weights(np.array([0, 32, 64, 16])) == pytest.approx([1, 0.5, 0.25, 0.5**0.5])
    assert create("h2o", None).query_weights(np.array([0, 32, 10**6])).tolist() == [1, 1, 1]


def test_every_known_policy_is_a_policy() -> None:
    for name in policies.names():
        policy = create(name, None)
        assert isinstance(policy, Policy)
        assert isinstance(policy.config, KVPolicyConfig)
        assert (type(policy).__doc__ or "").strip(), "says its paper, formula and limits"
