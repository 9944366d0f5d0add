"""Errors that a user can cause, each naming the value, the limit and the fix.

    H2OError(ValueError)
    ├── ConfigError        one bad setting
    ├── RefusedError       the model or engine has features that eviction can't serve (all of them, at once)
    ├── KernelError        a tensor that a kernel can't take, found before the launch
    └── SeamError          the installed vLLM does not have an extension point in the form we need

They derive from ValueError because that is what vLLM's own configuration raises, so its front ends show
them the same way. A broken invariant of ours is an ``assert``, never one of these.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_SHOWN_CHARACTERS = 100


class H2OError(ValueError):
    """Base of every error that vllm-h2o raises for a reason outside its own code."""


class ConfigError(H2OError):
    """A setting has a value we can't use.

    The message shows no more than the value's beginning: requests have values, too, of any length, and the
    message goes into answers, logs, and vLLM's search for paths, which is slow over long ones.

    Args:
        setting: the name the user wrote, for instance ``--kv-budget``.
        value: what was given.
        limit: what would be accepted.
        fix: what to do now.
    """

    def __init__(self, setting: str, value: object, limit: str, fix: str) -> None:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARACTERS:
            shown = f"{shown[:_SHOWN_CHARACTERS]}... ({len(shown)} characters)"
        super().__init__(f"{setting}={shown}: {limit}. {fix}")
        self.setting = setting
        self.value = value
        self.limit = limit
        self.fix = fix


@dataclass(frozen=True)
class Refusal:
    """One reason why ``--kv-policy`` can't be used: what, the value found, what to do."""

    what: str
    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} (found: {self.found}). {self.fix}"


class RefusedError(H2OError):
    """Every reason at once, so that one start-up shows all that has to change."""

    def __init__(self, policy: str, refusals: Sequence[Refusal]) -> None:
        lines = "".join(f"\n  - {refusal}" for refusal in refusals)
        super().__init__(f"--kv-policy {policy} can't be used here:{lines}")
        self.refusals = tuple(refusals)


class KernelError(H2OError):
    """A kernel was given something it can't take.

    Args:
        what: for instance ``dtype of query``.
        found: what was given.
        expected: what would be accepted.
    """

    def __init__(self, what: str, found: object, expected: str) -> None:
        super().__init__(f"{what} is {found}; the kernels take {expected}")


class SeamError(H2OError):
    """The installed vLLM differs from what a seam of ``vllm_h2o.engine.compat`` expects."""
