"""Numbers as users write them: counts, fractions, text from a command line or a YAML file."""

import math

from vllm_h2o.errors import ConfigError


def number(setting: str, value: object) -> float:
    """A finite number, or a ConfigError that names ``setting``."""
    try:
        parsed = float(str(value))
    except ValueError:
        parsed = math.nan
    if not math.isfinite(parsed):
        raise ConfigError(setting, value, "it is not a finite number", "Give a plain number")
    return parsed


def whole_number(setting: str, value: object, minimum: int) -> int:
    """A whole number of at least ``minimum``, or a ConfigError that names ``setting``."""
    number(setting, value)
    try:
        parsed = int(str(value))  # exact, however large
    except ValueError:
        parsed = int(float(str(value)))
        if parsed != float(str(value)):
            parsed = minimum - 1
    if parsed < minimum:
        limit = f"it must be a whole number of at least {minimum}"
        raise ConfigError(setting, value, limit, f"Give {minimum} or more")
    return parsed


def num_tokens(setting: str, value: int | float | str, whole: int, minimum: int = 1) -> int:
    """Tokens from a count (``512``) or a fraction of ``whole`` (``0.2``, ``1.0``)."""
    parsed = number(setting, value)
    is_fraction = isinstance(value, float) or "." in str(value)
    if not is_fraction:
        return whole_number(setting, value, minimum)
    if not 0 < parsed <= 1:
        raise ConfigError(
            setting, value, "a fraction must lie in (0, 1]", "Give a fraction, or a whole number of tokens"
        )
    return max(int(parsed * whole), minimum)
