"""Any values of flags and arguments: a configuration that works, or an error that names what was written.

``tests/test_config.py`` and ``tests/test_request_limits.py`` have the cases one by one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_h2o import policies
from vllm_h2o.config import ATTENTION_RANKS, GRANULARITIES, KVPolicyConfig
from vllm_h2o.engine.cli import add_flags, with_flags
from vllm_h2o.errors import ConfigError
from vllm_h2o.request_limits import FIELDS, RequestLimits
from vllm_h2o.settings import KVPolicySettings, flag_of

PARSER = FlexibleArgumentParser()
add_flags(PARSER)

LONGEST_MESSAGE = 1500
"""Characters; what names a value shows its beginning."""

fuzz = settings(max_examples=400, derandomize=True, database=None, suppress_health_check=list(HealthCheck))

NUMBERS = st.one_of(
    st.integers(-3, 4096),
    st.integers(),
    st.floats(0, 1),
    st.floats(),
    st.sampled_from([2**31, 2**63, 10**30, 1e300, 1e-300, -0.0]),
)
TEXTS = st.one_of(
    NUMBERS.map(str),
    st.sampled_from(
        ["", "none", "nan", "inf", "1e400", "9" * 5000, "0x20", "1_0", " 64 ", "12.", "\u0661\u0662"]
    ),
    st.sampled_from(["true", "{}", "[1]", "--kv-budget", "a=b", "x" * 10_000, "\x00", "a\nb"]),
    st.text(max_size=12),
)
# By setting: values that often work.
LIKELY: dict[str, Sequence[str]] = {
    "preset": ["paper"],
    "budget": ["256", "0.25", "512"],
    "prompt_budget": ["1024", "1.0"],
    "recent": ["0.1", "32", "0"],
    "pin_tokens": ["32", "64", "0"],
    "granularity": GRANULARITIES,
    "score_half_life": ["32", "none"],
    "score_pool": ["1", "15"],
    "score_window": ["16"],
    "score_rank": ATTENTION_RANKS,
}
LIKELY_FLAGS = st.lists(st.sampled_from(sorted(LIKELY)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(LIKELY[name]) for name in names})
)
ODD_FLAGS = st.dictionaries(st.sampled_from(sorted(LIKELY)), TEXTS, max_size=4)
ONE_ODD_FLAG = st.builds(
    lambda likely, name, value: {**likely, name: value}, LIKELY_FLAGS, st.sampled_from(sorted(LIKELY)), TEXTS
)
FLAGS = LIKELY_FLAGS | ONE_ODD_FLAG | ODD_FLAGS
NAMES_OF_POLICIES = st.sampled_from(
    [*["h2o"] * 12, *sorted(policies.names()), "", "H2O", "x" * 10_000, "vllm_h2o.policies:h2o"]
)
A_SERVER = {"max_model_len": 2048, "block_size": 32, "max_in_flight_tokens": 512}
SIZES = st.just(A_SERVER) | st.fixed_dictionaries(
    {
        "max_model_len": st.sampled_from([40, 512, 2048, 8192]),
        "block_size": st.sampled_from([16, 32, 128]),
        "max_in_flight_tokens": st.sampled_from([64, 2048]),
    }
)


def parsed(flags: dict[str, str], additional_config: Any = None) -> KVPolicySettings:
    """What the command line makes of ``--kv-...=...``, beside the other source."""
    arguments = PARSER.parse_args([f"{flag_of(name)}={value}" for name, value in flags.items()])
    return KVPolicySettings.from_additional_config(with_flags(additional_config, arguments))


def assert_works(config: KVPolicyConfig) -> None:
    """What the scheduler and the workers rely on."""
    block = config.block_size
    assert config.budget_tokens > 0
    assert config.budget_tokens % block == 0
    assert config.recent_tokens >= 0
    assert config.pinned_blocks >= 0
    if config.evicts:
        assert config.budget_tokens >= config.pinned_tokens + config.recent_tokens + block
        assert config.score_pool <= config.budget_tokens
        # They become numbers in arrays, and are added there.
        numbers = [value for value in config.to_dict().values() if isinstance(value, int)]
        assert sum(numbers) < 2**63
    assert config.score_pool % 2 == 1
    assert config.score_half_life_tokens is None or 0 < config.score_half_life_tokens < math.inf
    assert config.score_window_tokens is None or 1 <= config.score_window_tokens <= block
    assert config.prompt_budget_tokens is None or config.prompt_budget_tokens > config.budget_tokens
    assert config.max_blocks_per_request <= config.max_model_len // block + 2
    plain = json.loads(json.dumps(config.to_dict()))
    assert KVPolicyConfig.from_additional_config({"kv_policy": plain}) == config


def assert_names(error: ConfigError, written: dict[str, Any]) -> None:
    """The message begins with a setting and its value, and both are what was written."""
    message = str(error)
    assert message.startswith(f"{error.setting}=")
    assert len(message) <= LONGEST_MESSAGE
    by_flag = {flag_of(name) for name in written}
    if error.setting == "--kv-budget" and "budget" not in written:
        assert "(the default, " in message
        return
    defaults = policies.load(written["name"]).defaults if error.setting not in by_flag else {}
    value = {flag_of(name): value for name, value in {**defaults, **written}.items()}[error.setting]
    assert repr(error.value) == repr(value) or float(error.value) == float(value)


def outcome(settings_: Callable[[], KVPolicySettings], sizes: dict[str, int]) -> KVPolicyConfig | ConfigError:
    try:
        config, notes = settings_().resolve(**sizes)
    except ConfigError as error:
        return error
    assert all(len(note) <= LONGEST_MESSAGE for note in notes)
    return config


def assert_right(result: KVPolicyConfig | ConfigError, written: dict[str, Any]) -> None:
    if isinstance(result, ConfigError):
        assert_names(result, written)
    else:
        assert_works(result)


def test_every_flag_has_values_here() -> None:
    flags = {flag for action in PARSER._actions for flag in action.option_strings if flag.startswith("--kv-")}
    assert flags == {flag_of(name) for name in ("name", *LIKELY)}


def test_any_flags() -> None:
    results = []

    @fuzz
    @example(name="h2o", flags={"budget": "512", "prompt_budget": "1e30"}, sizes=A_SERVER)
    @given(name=NAMES_OF_POLICIES, flags=FLAGS, sizes=SIZES)
    def check(name: str, flags: dict[str, str], sizes: dict[str, int]) -> None:
        written = {"name": name, **flags}
        results.append(outcome(lambda: parsed(written), sizes))
        assert_right(results[-1], written)

    check()
    assert sum(isinstance(result, KVPolicyConfig) for result in results) >= 20
    assert len({result.setting for result in results if isinstance(result, ConfigError)}) >= 6


ANYTHING = st.one_of(
    NUMBERS, TEXTS, st.none(), st.booleans(), st.lists(NUMBERS, max_size=2), st.dictionaries(TEXTS, NUMBERS)
)
ADDITIONAL = LIKELY_FLAGS | st.dictionaries(
    st.sampled_from([*LIKELY, "kernels", "trace"]), ANYTHING, max_size=3
)


@fuzz
@given(name=st.sampled_from(sorted(policies.names())), flags=LIKELY_FLAGS, given_=ADDITIONAL, sizes=SIZES)
def test_any_additional_config_beside_flags(
    name: str, flags: dict[str, str], given_: dict[str, Any], sizes: dict[str, int]
) -> None:
    result = outcome(lambda: parsed({"name": name, **flags}, {"kv_policy": given_}), sizes)
    assert_right(result, {**given_, **flags, "name": name})


@fuzz
@given(flags=FLAGS.filter(bool), sizes=SIZES)
def test_any_flags_without_a_policy(flags: dict[str, str], sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="without --kv-policy") as error:
        parsed(flags)
    assert_names(error.value, flags)


POLICY, _ = KVPolicySettings(name="h2o", budget=256).resolve(**A_SERVER)


def limits_of(asked: dict[str, Any]) -> RequestLimits | ConfigError:
    try:
        return RequestLimits.of_request(asked, POLICY)
    except ConfigError as error:
        return error


@fuzz
@given(asked=st.dictionaries(st.sampled_from([*FIELDS, "kv_buget", "kv_", "kv_mine", "x"]), ANYTHING))
def test_any_arguments_of_a_request(asked: dict[str, Any]) -> None:
    limits = limits_of(asked)
    if isinstance(limits, ConfigError):
        assert limits.setting in asked
        assert str(limits).startswith(f"{limits.setting}=")
        assert len(str(limits)) <= LONGEST_MESSAGE
        return
    if asked.get("kv_policy") == "none":
        assert limits.budget_tokens == POLICY.no_budget_tokens
    else:
        assert limits.budget_tokens <= POLICY.budget_tokens
    assert limits.pinned_blocks >= POLICY.pinned_blocks


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param({f"kv_zz{i}q": 1 for i in range(100_000)}, id="many-names"),
        pytest.param({"kv_" + "b" * 5_000_000: 1}, id="a-long-name"),
        pytest.param({"kv_mine": "x" * 1_000_000}, id="a-long-value"),
        pytest.param({"kv_budget": "9" * 1_000_000}, id="many-digits"),
        pytest.param({"kv_policy": ["x"] * 100_000}, id="a-long-list"),
    ],
)
def test_reading_a_requests_arguments_takes_little_time(asked: dict[str, Any]) -> None:
    """The front end, the scheduler and every worker each do, and the others of a step wait."""
    started = time.process_time()
    limits = limits_of(asked)
    assert time.process_time() - started < 0.2
    assert len(str(limits)) <= LONGEST_MESSAGE
