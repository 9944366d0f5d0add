"""What users read when something can't work."""

from __future__ import annotations

import pytest

from vllm_h2o.errors import ConfigError, H2OError, Refusal, RefusedError, SeamError


@pytest.mark.parametrize("error", [ConfigError, RefusedError, SeamError])
def test_vllm_shows_them_as_its_own(error: type[H2OError]) -> None:
    assert issubclass(error, H2OError)
    assert issubclass(error, ValueError)


def test_config_error_says_value_limit_and_fix() -> None:
    error = ConfigError("--kv-budget", "x", "it is not a number", "Give one")
    assert str(error) == "--kv-budget='x': it is not a number. Give one"
    assert (error.setting, error.value) == ("--kv-budget", "x")


def test_refused_error_says_all_reasons_at_once() -> None:
    reasons = [
        Refusal("speculative decoding", "ngram", "Drop it."),
        Refusal("ALiBi", "MPT", "Serve it plain."),
    ]
    error = RefusedError("h2o", reasons)
    assert str(error) == (
        "--kv-policy h2o can't be used here:"
        "\n  - speculative decoding (found: ngram). Drop it."
        "\n  - ALiBi (found: MPT). Serve it plain."
    )
    assert error.refusals == tuple(reasons)
