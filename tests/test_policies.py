"""What holds for every policy, and what each of them says."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h2o import policies
from vllm_h2o.config import RANKS, KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.planner import StepPlanner
from vllm_h2o.policies.base import AttentionPolicy, Policy
from vllm_h2o.policies.h2o import H2OPolicy
from vllm_h2o.query_ring import QueryRing
from vllm_h2o.settings import KVPolicySettings, flag_of

HALF_LIVES = [None, 0.5, 32.0, 1e5]
GIVEN: dict[str, Any] = {
    "recent": 64,
    "score_half_life": 16.0,
    "score_pool": 3,
    "score_window": 8,
    "score_rank": "mean",
}
"""Every setting that not all policies use, and a value that those take which use it."""


def resolve(name: str, **written: Any) -> KVPolicyConfig:
    config, _ = KVPolicySettings(**{"name": name, "budget": 512, **written}).resolve(
        max_model_len=2048, block_size=32, max_in_flight_tokens=512
    )
    return config


def by_attention(name: str, **written: Any) -> AttentionPolicy:
    policy = policies.create(resolve(name, **written))
    assert isinstance(policy, AttentionPolicy)
    return policy


ATTENTION = [
    *[("h2o", {"score_half_life": half_life}) for half_life in HALF_LIVES],
    *[("snapkv", {"score_window": window}) for window in (1, 7, 32)],
    ("tova", {}),
]


@pytest.fixture(params=ATTENTION, ids=lambda param: f"{param[0]}-{param[1]}")
def policy(request: pytest.FixtureRequest) -> AttentionPolicy:
    name, written = request.param
    return by_attention(name, **written)


# --- every policy --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policies.names())
def test_every_policy_says_what_it_is(name: str) -> None:
    made = policies.create(resolve(name))
    assert isinstance(made, Policy)
    assert isinstance(made.config, KVPolicyConfig)
    assert set(made.ranks) <= set(RANKS)
    assert made.config.rank_by == made.defaults.get("score_rank", made.ranks[0])
    doc = type(made).__doc__ or ""
    for word in ("Formula:", "Direction: higher = keep", "Cost:"):
        assert word in doc, f"{name} doesn't say its {word}"
    assert made.config.scores_attention == isinstance(made, AttentionPolicy)
    StepPlanner(made.config, QueryRing(2, 32), None)


@pytest.mark.parametrize("name", policies.names())
@pytest.mark.parametrize("setting", GIVEN)
def test_a_setting_is_used_or_refused(name: str, setting: str) -> None:
    made = policies.load(name)
    if setting in made.settings:
        assert resolve(name, **{setting: GIVEN[setting]}) != resolve(name)
        return
    with pytest.raises(ConfigError) as error:
        resolve(name, **{setting: GIVEN[setting]})
    message = str(error.value)
    assert message.startswith(
        f"{flag_of(setting)}={GIVEN[setting]!r}: it has no effect under --kv-policy {name}"
    )
    for used in made.settings:
        assert flag_of(used) in message


@pytest.mark.parametrize(
    ("name", "recent", "pool", "window"),
    [
        ("h2o", 51, 15, None),
        ("keydiff", 0, 1, None),
        ("random", 256, 1, None),
        ("snapkv", 32, 7, 32),
        ("streaming", 0, 1, None),
        ("tova", 0, 1, None),
    ],
)
def test_defaults_are_the_papers(name: str, recent: int, pool: int, window: int | None) -> None:
    config = resolve(name)
    assert (config.recent_tokens, config.score_pool, config.score_window_tokens) == (recent, pool, window)


# --- policies that score attention ---------------------------------------------------------------


def test_weights_are_float32_of_any_shape(policy: AttentionPolicy) -> None:
    ages = np.arange(6, dtype=np.int64).reshape(2, 3)
    for array in (policy.query_weights(ages), policy.decay(ages)):
        assert array.dtype == np.float32
        assert array.shape == (2, 3)
        assert ((array >= 0) & (array <= 1)).all()


def test_the_newest_query_counts_in_full_and_no_query_decays_nothing(policy: AttentionPolicy) -> None:
    assert policy.query_weights(np.array([0])).tolist() == [1]
    assert policy.decay(np.array([0])).tolist() == [1]


def test_older_queries_never_count_more(policy: AttentionPolicy) -> None:
    assert (np.diff(policy.query_weights(np.arange(10_000))) <= 0).all()


def test_queries_that_are_not_scored_would_not_count(policy: AttentionPolicy) -> None:
    for flushed in [*range(1, 70), 1000, 5000]:
        scored = int(policy.num_scored(np.array([flushed]))[0])
        assert 1 <= scored <= flushed
        assert not policy.query_weights(np.arange(scored, flushed)).any()


def test_total_weights_are_those_of_all_queries_that_saw_a_token(policy: AttentionPolicy) -> None:
    total = policy.total_weights()
    assert (total.dtype, total.shape) == (np.float32, (2048,))
    for num_queries in (1, 2, 31, 2048):
        weights = policy.query_weights(np.arange(num_queries)).astype(np.float64)
        assert total[num_queries - 1] == pytest.approx(weights.sum(), rel=1e-6)


@settings(max_examples=30)
@given(
    received=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    half_life=st.sampled_from(HALF_LIVES),
)
def test_h2o_in_parts_equals_h2o_at_once(received: list[float], cut: int, half_life: float | None) -> None:
    """Prefill chunks, whole tail blocks and early flushes may cut the queries anywhere."""
    policy = by_attention("h2o", score_half_life=half_life)
    in_parts = flush(policy, flush(policy, 0.0, received[:cut]), received[cut:])
    assert in_parts == pytest.approx(flush(policy, 0.0, received), rel=1e-4, abs=1e-6)


def flush(policy: AttentionPolicy, score: float, received: list[float]) -> float:
    ages = np.arange(len(received))[::-1]
    decay = policy.decay(np.array(len(received)))
    return float(score * decay + policy.query_weights(ages) @ np.array(received))


def test_half_life_by_hand() -> None:
    policy = by_attention("h2o", score_half_life=32.0)
    assert policy.query_weights(np.array([0, 32, 64, 16])) == pytest.approx([1, 0.5, 0.25, 0.5**0.5])
    plain = by_attention("h2o", score_half_life="none")
    assert plain.query_weights(np.array([0, 32, 10**6])).tolist() == [1, 1, 1]


def test_snapkv_forgets_when_a_window_is_full() -> None:
    policy = by_attention("snapkv", score_window=4)
    assert policy.query_weights(np.arange(6)).tolist() == [1, 1, 1, 1, 0, 0]
    assert policy.decay(np.array([0, 3, 4, 32, 1000])).tolist() == [1, 1, 0, 0, 0]


def test_tova_knows_the_last_query_only() -> None:
    policy = by_attention("tova")
    assert policy.query_weights(np.arange(3)).tolist() == [1, 0, 0]
    assert policy.decay(np.array([0, 1, 2])).tolist() == [1, 0, 0]


@pytest.mark.parametrize("window", [0, -1, 33, "lots", 2.5])
def test_window_out_of_range(window: object) -> None:
    with pytest.raises(ConfigError, match="--kv-score-window"):
        resolve("snapkv", score_window=window)


@pytest.mark.parametrize("rank", ["keys", "age", "", "Sum"])
def test_rank_out_of_range(rank: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-score-rank=.*Use one of sum, mean, value"):
        resolve("h2o", score_rank=rank)


# --- policies of other distributions -------------------------------------------------------------


class NoRanks(Policy):
    """Forgot to say what it ranks by."""


class Disagreeing(AttentionPolicy):
    """Scores attention, but ranks by something else."""

    ranks = ("keys",)


@pytest.fixture
def entry_points(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Points that were found; a stand-in for installed distributions."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(policies, "_entry_points", lambda: tuple(points))
    return points


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, policies.ENTRY_POINT_GROUP)


def test_a_policy_of_another_distribution_is_known(entry_points: list[EntryPoint]) -> None:
    entry_points.append(point("mine", "vllm_h2o.policies.h2o:H2OPolicy"))
    assert "mine" in policies.names()
    assert isinstance(policies.create(resolve("mine")), H2OPolicy)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "h2o",
            "vllm_h2o.policies.tova:TOVAPolicy",
            "several distributions have a policy of that name: vllm-h2o, ",
        ),
        ("mine", "no_such_module:Policy", "can't be imported"),
        ("mine", "vllm_h2o.policies.h2o:Gone", "can't be imported"),
        (
            "mine",
            "vllm_h2o.config:KVPolicyConfig",
            r"is no policy\. Make it a subclass of",
        ),
        ("mine", f"{__name__}:NoRanks", "ranks tokens by"),
        ("mine", f"{__name__}:Disagreeing", "ranks tokens by"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(
    entry_points: list[EntryPoint], name: str, value: str, message: str
) -> None:
    entry_points.append(point(name, value))
    with pytest.raises(ConfigError, match=message):
        resolve(name)
