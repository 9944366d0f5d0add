"""Every setting a user can get wrong, and what the resolved configuration guarantees."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_h2o import policies
from vllm_h2o.config import CONFIG_KEY, KernelChoice, KVPolicyConfig
from vllm_h2o.errors import ConfigError, H2OError
from vllm_h2o.policies.h2o import H2OPolicy
from vllm_h2o.settings import KVPolicySettings, flag_of

MODEL_LEN, BLOCK, IN_FLIGHT = 2048, 32, 512


def resolve(
    max_model_len: int = MODEL_LEN, block_size: int = BLOCK, **written: Any
) -> tuple[KVPolicyConfig, list[str]]:
    chosen = KVPolicySettings(**{"name": "h2o", **written})
    return chosen.resolve(max_model_len=max_model_len, block_size=block_size, max_in_flight_tokens=IN_FLIGHT)


def config_of(**written: Any) -> KVPolicyConfig:
    """The configuration where nothing had to be changed."""
    config, notes = resolve(**written)
    assert notes == []
    return config


def refusal(**written: Any) -> str:
    """The message; always a typed error that is a ValueError, as vLLM's own are."""
    with pytest.raises(ConfigError) as error:
        resolve(**written)
    assert isinstance(error.value, H2OError)
    assert isinstance(error.value, ValueError)
    return str(error.value)


# --- what is accepted ----------------------------------------------------------------------------


def test_defaults_are_what_measured_best_and_one_pinned_block() -> None:
    config, notes = resolve(budget=512)
    assert notes == []
    assert config == KVPolicyConfig(
        name="h2o",
        block_size=32,
        budget_tokens=512,
        recent_tokens=51,
        pinned_blocks=1,
        granularity="token",
        score_half_life_tokens=32.0,
        score_pool=15,
        rank_by="value",
        max_model_len=2048,
        max_in_flight_tokens=512,
        trace=False,
    )
    assert config.pinned_tokens == 32
    assert config.evicts
    # ceil((512 + 512) / 32) + 1
    assert config.max_blocks_per_request == 33
    assert config.tracks_positions  # pooling needs them


def test_the_preset_paper_is_the_paper() -> None:
    config = config_of(budget=512, preset="paper")
    plain = {"recent": 0.5, "pin_tokens": 0, "score_half_life": "none", "score_pool": 1} | {
        "score_rank": "sum"
    }
    assert config == config_of(budget=512, **plain)
    assert config.score_half_life_tokens is None
    assert (config.recent_tokens, config.pinned_tokens, config.score_pool) == (256, 0, 1)
    assert (config.granularity, config.rank_by) == ("token", "sum")
    assert not config.tracks_positions


def test_flags_go_before_a_preset() -> None:
    config = config_of(budget=512, preset="paper", recent=64, granularity="block")
    assert (config.recent_tokens, config.granularity, config.score_pool) == (64, "block", 1)


@pytest.mark.parametrize(("name", "fix"), [("h2o", "Use one of paper"), ("random", "Leave it out")])
def test_an_unknown_preset_is_refused(name: str, fix: str) -> None:
    message = refusal(name=name, budget=512, preset="best")
    assert message == f"--kv-preset='best': --kv-policy {name} has no such preset. {fix}"


def test_default_budget_is_a_fifth_of_the_longest_sequence() -> None:
    config, notes = resolve()
    assert config.budget_tokens == 416  # 2048 / 5 = 409.6, in whole blocks
    assert notes == ["budget 409 rounded up to 416 tokens (a multiple of block size 32)"]


@pytest.mark.parametrize(
    ("written", "tokens"),
    [(256, 256), ("256", 256), (0.25, 512), ("0.25", 512), ("0.5", 1024), ("2e2", 224)],
)
def test_budget_is_a_count_or_a_fraction_of_the_longest_sequence(
    written: int | float | str, tokens: int
) -> None:
    assert resolve(budget=written)[0].budget_tokens == tokens


@pytest.mark.parametrize(
    ("written", "tokens"), [(0, 0), ("0", 0), (100, 100), (0.25, 128), ("0.1", 51), ("100", 100)]
)
def test_recent_is_a_count_or_a_fraction_of_the_budget(written: int | float | str, tokens: int) -> None:
    assert config_of(budget=512, recent=written).recent_tokens == tokens


def test_values_may_be_text_as_flags_are() -> None:
    as_text = {
        "budget": "512",
        "recent": "64",
        "pin_tokens": "64",
        "granularity": "block",
        "score_half_life": "32.5",
        "score_pool": "15",
    }
    as_numbers = {**as_text, "budget": 512, "recent": 64, "pin_tokens": 64} | {
        "score_half_life": 32.5,
        "score_pool": 15,
    }
    assert config_of(**as_text) == config_of(**as_numbers)
    assert config_of(**as_text).score_half_life_tokens == 32.5
    assert config_of(**as_text).granularity == "block"


def test_nothing_need_be_pinned() -> None:
    assert config_of(budget=64, pin_tokens=0, recent=0).pinned_blocks == 0


@pytest.mark.parametrize(
    ("settings_", "tracks"),
    [({}, False), ({"score_pool": 3}, True), ({"trace": True}, True), ({"score_rank": "mean"}, True)],
)
def test_positions_are_tracked_only_where_they_are_needed(settings_: dict[str, Any], tracks: bool) -> None:
    assert config_of(**{"budget": 512, "score_pool": 1, **settings_}).tracks_positions is tracks


# --- what is changed, with a note ----------------------------------------------------------------


@given(budget=st.integers(96, 4000), block_size=st.sampled_from([16, 32, 48]))
def test_budget_is_rounded_up_to_whole_blocks_with_a_note(budget: int, block_size: int) -> None:
    config, notes = resolve(
        max_model_len=100_000, block_size=block_size, budget=budget, recent=0, pin_tokens=0
    )
    assert config.budget_tokens % block_size == 0
    assert 0 <= config.budget_tokens - budget < block_size
    said = [note for note in notes if f"budget {budget} rounded up to {config.budget_tokens}" in note]
    assert len(said) == len(notes) == int(budget % block_size != 0)


def test_pinned_tokens_are_rounded_up_to_whole_blocks_with_a_note() -> None:
    config, notes = resolve(budget=512, pin_tokens=33)
    assert config.pinned_blocks == 2
    assert notes == ["pinned tokens 33 rounded up to 64 (whole blocks)"]


@pytest.mark.parametrize("key", ["kv-policy", "KV_POLICY"])
def test_a_misspelt_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="Write it kv_policy"):
        KVPolicySettings.from_additional_config({key: {"name": "h2o"}})


@pytest.mark.parametrize(("budget", "rounded"), [(2049, 2080), (5000, 5024), (10**9, 10**9)])
def test_budget_over_the_longest_sequence_is_unlimited_with_a_note(budget: int, rounded: int) -> None:
    # However much is to be pinned or kept recent: nothing is evicted, so all of it holds.
    config, notes = resolve(budget=budget, recent=0.99, pin_tokens=1024)
    assert not config.evicts
    assert f"budget {rounded} is over max_model_len 2048: nothing is ever evicted" in notes


def test_budget_of_the_longest_sequence_evicts_nothing() -> None:
    assert not config_of(budget=2048).evicts
    assert not config_of(budget=1.0).evicts
    assert config_of(budget=2016).evicts


# --- what is refused -----------------------------------------------------------------------------


def test_unknown_policy_lists_the_known() -> None:
    message = refusal(name="h20", budget=512)
    assert message == (
        "--kv-policy='h20': there is no such policy. Known: h2o, keydiff, random, snapkv, streaming, tova"
    )


def test_known_policy_is_created_with_its_configuration() -> None:
    config = config_of(budget=512)
    policy = policies.create(config)
    assert isinstance(policy, H2OPolicy)
    assert policy.config is config
    with pytest.raises(ConfigError, match="Known: h2o, keydiff"):
        policies.create(replace(config, name="h20"))


NOT_A_NUMBER = [
    "nan",
    "inf",
    "-inf",
    float("nan"),
    float("inf"),
    "lots",
    "",
    "512 tokens",
    True,
    [512],
    "0x20",
]
NOT_A_LENGTH = [*NOT_A_NUMBER, -1, "-1", -512, "1e-1", -0.5, 0.0, 1.5, "1.5", "512.0", 512.0]


@pytest.mark.parametrize("value", [*NOT_A_LENGTH, 0, "0"])
def test_budget_out_of_range(value: object) -> None:
    assert refusal(budget=value).startswith(f"--kv-budget={value!r}: ")


@pytest.mark.parametrize("value", NOT_A_LENGTH)
def test_recent_out_of_range(value: object) -> None:
    assert refusal(budget=512, recent=value).startswith(f"--kv-recent={value!r}: ")


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, -1, "-32", 0.5])
def test_pinned_tokens_out_of_range(value: object) -> None:
    assert refusal(budget=512, pin_tokens=value).startswith(f"--kv-pin-tokens={value!r}: ")


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0, -1, "-0.5", 0.0])
def test_half_life_out_of_range(value: object) -> None:
    assert refusal(budget=512, score_half_life=value).startswith(f"--kv-score-half-life={value!r}: ")


@pytest.mark.parametrize("value", [*NOT_A_NUMBER, 0, -1, 2.5])
def test_pool_out_of_range(value: object) -> None:
    assert refusal(budget=512, score_pool=value).startswith(f"--kv-score-pool={value!r}: ")


@pytest.mark.parametrize("value", ["head", "", "Token"])
def test_granularity_unknown(value: str) -> None:
    message = refusal(budget=512, granularity=value)
    assert message == f"--kv-granularity={value!r}: it is not known. Use one of token, block"


@pytest.mark.parametrize(
    ("written", "limit", "fix"),
    [
        ({"budget": 0}, "a whole number of at least 1", "Give 1 or more"),
        ({"budget": -0.1}, "a fraction must lie in (0, 1]", "a whole number of tokens"),
        ({"budget": "many"}, "not a finite number", "Give a plain number"),
        ({"recent": 1.01}, "a fraction must lie in (0, 1]", "a whole number of tokens"),
        ({"pin_tokens": -1}, "a whole number of at least 0", "Give 0 or more"),
        ({"score_half_life": -2}, "a positive number", "Give none for the paper's plain sum"),
        ({"score_pool": 4}, "it must be odd", "Use 3 or 5"),
        ({"score_pool": 2**53 + 2}, "it must be odd", f"Use {2**53 + 1} or {2**53 + 3}"),
        ({"score_pool": 513}, "wider than the budget of 512 tokens", "such as 15"),
    ],
)
def test_messages_say_value_limit_and_fix(written: dict[str, Any], limit: str, fix: str) -> None:
    ((field, value),) = written.items()
    message = refusal(**{"budget": 512, **written})
    assert message.startswith(f"{flag_of(field)}={value!r}: ")
    assert limit in message
    assert fix in message


def test_budget_too_small_says_what_it_has_to_hold() -> None:
    message = refusal(budget=64)
    assert message == (
        "--kv-budget=64: 64 tokens can't hold 32 pinned + 6 recent + one block of 32. Give at least 96"
    )


shares = st.one_of(st.integers(0, 700), st.floats(0.001, 1.0))


@settings(max_examples=300)
@given(
    block_size=st.sampled_from([16, 32]),
    max_model_len=st.integers(40, 6000),
    budget=st.one_of(st.integers(1, 900), st.floats(0.001, 0.9)),
    recent=shares,
    pin_tokens=st.integers(0, 300),
)
def test_the_smallest_budget_that_a_refusal_names_is_the_smallest(
    block_size: int, max_model_len: int, budget: float, recent: float, pin_tokens: int
) -> None:
    others: dict[str, Any] = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "recent": recent,
        "pin_tokens": pin_tokens,
    }

    def accepted(budget: float) -> bool:
        """Whether this budget works; one that covers every sequence does, but bounds nothing."""
        try:
            return resolve(budget=budget, **others)[0].evicts
        except ConfigError:
            return False

    try:
        config, _ = resolve(budget=budget, **others)
    except ConfigError as error:
        message = str(error)
    else:
        room = config.budget_tokens - config.pinned_tokens - config.recent_tokens
        assert not config.evicts or room >= block_size
        return
    assert message.startswith(f"--kv-budget={budget!r}: ")
    named = re.search(r"Give at least (\d+)$", message)
    if named is None:
        evicting = range(block_size, max_model_len, block_size)
        some = [*evicting[:: len(evicting) // 10 + 1], *evicting[-1:]]
        assert not any(accepted(tokens) for tokens in some), message
        assert "Lower --kv-recent or --kv-pin-tokens" in message
        return
    smallest = int(named[1])
    assert smallest % block_size == 0
    assert accepted(smallest)
    assert smallest == block_size or not accepted(smallest - block_size)


@pytest.mark.parametrize(
    ("given", "tokens"), [(None, None), (512, None), (513, 544), (0.5, 4096), (1.0, 8192), ("1.0", 8192)]
)
def test_a_budget_of_prompts(given: Any, tokens: int | None) -> None:
    config, _ = resolve(budget=512, prompt_budget=given, max_model_len=8192, block_size=32)
    assert config.prompt_budget_tokens == tokens
    held = -(-min((tokens or 512) + config.max_in_flight_tokens, 8192) // 32) + 1
    assert config.max_blocks_per_request == held


def test_a_budget_of_prompts_under_the_budget() -> None:
    with pytest.raises(ConfigError, match=r"--kv-prompt-budget=300: 320 tokens are under the budget of 512"):
        resolve(budget=512, prompt_budget=300, max_model_len=8192, block_size=32)


# --- two sources ---------------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Any, Any]] = {
    "name": ("h2o", "random"),
    "preset": ("paper", "best"),
    "budget": (512, 256),
    "prompt_budget": (1024, 2048),
    "recent": (0.5, 0.25),
    "pin_tokens": (32, 64),
    "granularity": ("token", "block"),
    "score_half_life": (32.0, 16.0),
    "score_pool": (3, 5),
    "score_window": (32, 16),
    "score_rank": ("mean", "value"),
    "kernels": ("native", "torch"),
    "trace": (True, False),
}


def test_the_table_of_settings_is_complete() -> None:
    assert list(SETTINGS) == [field.name for field in fields(KVPolicySettings)]


@pytest.mark.parametrize("field", SETTINGS)
def test_contradictory_sources_name_both(field: str) -> None:
    first, second = SETTINGS[field]
    with pytest.raises(ConfigError) as error:
        KVPolicySettings.merge(KVPolicySettings(**{field: first}), KVPolicySettings(**{field: second}))
    message = str(error.value)
    assert message.startswith(
        f"{flag_of(field)}={first!r}: additional_config.kv_policy.{field} says {second!r}"
    )
    assert message.endswith("Give it in one place only")


@pytest.mark.parametrize("field", SETTINGS)
@pytest.mark.parametrize("by_flag", [False, True])
def test_sources_complete_each_other(field: str, by_flag: bool) -> None:
    value = SETTINGS[field][0]
    one, other = KVPolicySettings(**{field: value}), KVPolicySettings(name="h2o")
    merged = KVPolicySettings.merge(*((one, other) if by_flag else (other, one)))
    assert merged == KVPolicySettings(**{"name": "h2o", field: value})


def test_sources_may_say_the_same() -> None:
    # Flags arrive as text, YAML as numbers.
    by_flag = KVPolicySettings(name="h2o", budget="256", recent="0.5")
    by_config = KVPolicySettings(name="h2o", budget=256, recent=0.5)
    assert KVPolicySettings.merge(by_flag, by_config) == by_flag


@pytest.mark.parametrize("field", [field for field in SETTINGS if field != "name"])
@pytest.mark.parametrize("by_flag", [False, True])
def test_no_setting_works_without_a_policy(field: str, by_flag: bool) -> None:
    value = SETTINGS[field][1]
    sources = KVPolicySettings(**{field: value}), KVPolicySettings()
    with pytest.raises(ConfigError) as error:
        KVPolicySettings.merge(*(sources if by_flag else sources[::-1]))
    assert str(error.value) == (
        f"{flag_of(field)}={value!r}: it has no effect without --kv-policy. Add --kv-policy h2o, or drop it"
    )


def test_no_settings_at_all_are_no_policy() -> None:
    assert KVPolicySettings.merge(KVPolicySettings(), KVPolicySettings()) == KVPolicySettings()


# --- additional_config ---------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [None, {}, {"other": 1}, {CONFIG_KEY: None}, "text"])
def test_absent_settings(absent: object) -> None:
    assert KVPolicySettings.from_additional_config(absent) == KVPolicySettings()
    assert KVPolicyConfig.from_additional_config(absent) is None


def test_settings_are_a_name_or_a_mapping() -> None:
    read = KVPolicySettings.from_additional_config
    assert read({CONFIG_KEY: "h2o"}) == KVPolicySettings(name="h2o")
    assert read({CONFIG_KEY: {"name": "h2o", "budget": 64}}) == KVPolicySettings(name="h2o", budget=64)
    for wrong in (False, 512, ["h2o"]):
        with pytest.raises(ConfigError, match=r"must be a name or a mapping\. Write \{kv_policy: "):
            read({CONFIG_KEY: wrong})


@pytest.mark.parametrize("written", [{}, {"name": None, "budget": None}])
def test_a_policy_without_a_name_is_refused(written: dict[str, Any]) -> None:
    """It would serve without a policy and not say so."""
    KVPolicySettings.require_name({CONFIG_KEY: None, "other": 1})
    KVPolicySettings.require_name(None)
    with pytest.raises(ConfigError, match=r"it names no policy\. Add name: h2o"):
        KVPolicySettings.require_name({CONFIG_KEY: written})


@pytest.mark.parametrize("key", ["kv-policy", "KV_POLICY", "kvpolicy", " kv_policy", "kv_policies"])
def test_near_misses_of_the_key_are_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no such key\. Write it kv_policy"):
        KVPolicySettings.from_additional_config({key: {"name": "h2o"}})


def test_a_default_budget_is_not_taken_for_the_users() -> None:
    with pytest.raises(ConfigError, match=r"the default, 0\.2 of --max-model-len 33"):
        resolve(max_model_len=33)


@pytest.mark.parametrize("key", ["budgets", "budget_tokens", "block_size", "", 7])
def test_unknown_key_lists_the_known(key: object) -> None:
    with pytest.raises(ConfigError) as error:
        KVPolicySettings.from_additional_config({CONFIG_KEY: {"name": "h2o", key: 1}})
    message = str(error.value)
    assert message.startswith(f"additional_config.kv_policy.{key}=1: there is no such setting. Known: name, ")
    assert all(field in message for field in SETTINGS)


@given(
    budget=st.integers(128, 3000),
    recent=st.one_of(st.integers(0, 32), st.floats(0.01, 0.4)),
    pin_tokens=st.integers(0, 32),
    granularity=st.sampled_from(["token", "block"]),
    half_life=st.one_of(st.none(), st.floats(0.1, 1e6)),
    pool=st.integers(0, 20).map(lambda half: 2 * half + 1),
    kernels=st.sampled_from(["auto", "native", "torch"]),
    trace=st.booleans(),
)
def test_resolved_configuration_survives_the_journey(
    budget: int,
    recent: float,
    pin_tokens: int,
    granularity: str,
    half_life: float | None,
    pool: int,
    kernels: KernelChoice,
    trace: bool,
) -> None:
    config, _ = resolve(
        budget=budget,
        recent=recent,
        pin_tokens=pin_tokens,
        granularity=granularity,
        score_half_life=half_life,
        score_pool=pool,
        kernels=kernels,
        trace=trace,
    )
    plain = config.to_dict()
    assert all(isinstance(value, int | float | str | None) for value in plain.values())
    assert KVPolicyConfig.from_additional_config({"other": 1, CONFIG_KEY: plain}) == config


@given(st.sampled_from([field.name for field in fields(KVPolicyConfig)]))
def test_configuration_is_frozen(field: str) -> None:
    config = config_of(budget=512)
    with pytest.raises(FrozenInstanceError):
        setattr(config, field, getattr(config, field))
    with pytest.raises(FrozenInstanceError):
        KVPolicySettings(name="h2o").name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "flag"),
    [("name", "--kv-policy"), ("budget", "--kv-budget"), ("score_half_life", "--kv-score-half-life")],
)
def test_flags_are_named_after_the_fields(field: str, flag: str) -> None:
    assert flag_of(field) == flag
