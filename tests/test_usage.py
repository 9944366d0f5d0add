"""What operators are told about the cache: sums over requests, kept up to date step by step."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o import retention
from vllm_h2o.usage import CacheUsage, UsageReport

BUDGET, BLOCK = 64, 16


def evicted_tokens(computed: int) -> int:
    return BLOCK * retention.evicted_blocks(computed, budget_tokens=BUDGET, block_size=BLOCK)


STEPS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.one_of(st.integers(1, 150), st.just("end"))), max_size=60
)


@given(STEPS)
def test_sums_are_those_of_the_requests_that_run(steps: list[tuple[str, int | str]]) -> None:
    usage = CacheUsage()
    computed: dict[str, int] = {}
    evicted_in_all = over_in_all = 0
    for request, event in steps:
        if event == "end":
            usage.forget(request)  # also of one that never ran
            computed.pop(request, None)
        else:
            before = computed.get(request, 0)
            computed[request] = before + int(event)
            usage.update(request, computed[request], evicted_tokens(computed[request]))
            evicted_in_all += evicted_tokens(computed[request]) - evicted_tokens(before)
            over_in_all += evicted_tokens(before) == 0 < evicted_tokens(computed[request])
        now = {request: evicted_tokens(tokens) for request, tokens in computed.items()}
        assert usage.logical_tokens == sum(computed.values())
        assert usage.live_tokens == sum(computed.values()) - sum(now.values())
        assert usage.requests_over_budget == sum(evicted > 0 for evicted in now.values())
        assert usage.evicted_tokens == evicted_in_all
        assert usage.requests_evicted == over_in_all


def test_the_same_again_changes_nothing() -> None:
    usage = CacheUsage()
    for _ in range(3):
        usage.update("a", 100, evicted_tokens(100))
    assert (usage.logical_tokens, usage.evicted_tokens, usage.requests_evicted) == (100, 48, 1)


@given(st.lists(st.integers(0, 2**40), min_size=9, max_size=9))
def test_a_report_survives_the_way_in_a_mapping_of_others(values: list[int]) -> None:
    report = UsageReport(**dict(zip(asdict(UsageReport()), values, strict=True)))
    mapping = {"waiting_to_start": 3}
    mapping.update(report.to_items())
    assert len(mapping) == 10
    assert UsageReport.take_from(mapping) == report
    assert mapping == {"waiting_to_start": 3}, "nothing of ours stays behind, nothing of others goes"


def test_no_report_is_none() -> None:
    assert UsageReport.take_from({"waiting_to_start": 0}) is None


@pytest.mark.parametrize("left_out", list(asdict(UsageReport())))
def test_what_is_not_said_is_zero(left_out: str) -> None:
    mapping = {name: 5 for name, _ in UsageReport().to_items()}
    del mapping[f"kv_policy.{left_out}"]
    report = UsageReport.take_from(mapping)
    assert report is not None
    assert getattr(report, left_out) == 0
