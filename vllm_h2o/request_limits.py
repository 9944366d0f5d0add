"""Limits of single requests: a smaller budget, more pinned tokens, or no eviction at all; and their prompts.

They are written in the request itself (``vllm_xargs`` over HTTP, ``SamplingParams.extra_args`` in Python),
which the scheduler and every worker receive whole before its first step. Each of them derives the limits
alone and never changes them, so they agree at every step, as on the one rule (``vllm_h2o.retention``).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from itertools import islice
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from vllm_h2o import retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.parsing import whole_number

BUDGET, PIN_TOKENS, POLICY, REPORT = "kv_budget", "kv_pin_tokens", "kv_policy", "kv_report"
FIELDS = (BUDGET, PIN_TOKENS, POLICY, REPORT)
NO_POLICY = "none"

IntArray = npt.NDArray[np.int64]


class RequestLimits(NamedTuple):
    """What the rule has to know of one request.

    Attributes:
        prompt_budget_tokens: the budget that counts for its first ``num_prompt_tokens``.
    """

    budget_tokens: int
    pinned_blocks: int
    prompt_budget_tokens: int = 0
    num_prompt_tokens: int = 0

    @classmethod
    def of_policy(cls, policy: KVPolicyConfig) -> Self:
        return cls(policy.budget_tokens, policy.pinned_blocks)

    def evicted_blocks(self, num_computed_tokens: int, block_size: int) -> int:
        """The rule (``vllm_h2o.retention``) for this request."""
        budget_tokens = retention.budget_at(
            num_computed_tokens,
            budget_tokens=self.budget_tokens,
            prompt_budget_tokens=self.prompt_budget_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
        )
        return retention.evicted_blocks(
            num_computed_tokens, budget_tokens=budget_tokens, block_size=block_size
        )

    @classmethod
    def of_request(cls, extra_args: Mapping[str, Any] | None, policy: KVPolicyConfig) -> Self:
        """What a request asks for.

        Raises:
            ConfigError: a value is out of range, or a field is misspelt.
        """
        if not extra_args:
            return cls.of_policy(policy)
        _check_names(extra_args)
        asked = {name: extra_args[name] for name in FIELDS if extra_args.get(name) is not None}
        if asked.get(REPORT, 0) not in (0, 1):
            raise ConfigError(REPORT, asked[REPORT], "it must be 0 or 1", "Give 1 to get a report")
        if POLICY in asked:
            return cls._without_policy(asked, policy)
        block_size = policy.block_size
        pinned = whole_number(PIN_TOKENS, asked.get(PIN_TOKENS, policy.pinned_tokens), policy.pinned_tokens)
        budget = whole_number(BUDGET, asked.get(BUDGET, policy.budget_tokens), 1)
        limits = cls(-(-budget // block_size) * block_size, -(-pinned // block_size))
        if limits == cls.of_policy(policy):
            return limits
        if not policy.evicts:
            name = BUDGET if BUDGET in asked else PIN_TOKENS
            raise ConfigError(
                name, asked[name], "this server's budget covers its longest sequence, so it drops nothing",
                "Leave it out, or serve with a --kv-budget below --max-model-len",
            )  # fmt: skip
        if limits.budget_tokens > policy.budget_tokens:
            raise ConfigError(
                BUDGET, budget, f"it is over the server's budget of {policy.budget_tokens} tokens",
                f"Give at most {policy.budget_tokens}, or {POLICY} {NO_POLICY}",
            )  # fmt: skip
        smallest = policy.recent_tokens + block_size
        if limits.budget_tokens - limits.pinned_blocks * block_size < smallest:
            raise ConfigError(
                PIN_TOKENS if BUDGET not in asked else BUDGET, pinned if BUDGET not in asked else budget,
                f"{limits.budget_tokens} tokens can't hold {limits.pinned_blocks * block_size} pinned + "
                f"{policy.recent_tokens} recent + one block of {block_size}",
                "Give a larger budget or fewer pinned tokens",
            )  # fmt: skip
        return limits

    @classmethod
    def _without_policy(cls, asked: Mapping[str, Any], policy: KVPolicyConfig) -> Self:
        if asked[POLICY] != NO_POLICY:
            raise ConfigError(
                POLICY, asked[POLICY], f"a request can't choose a policy; the server's is {policy.name}",
                f"Give {NO_POLICY} to lose nothing, or leave it out",
            )  # fmt: skip
        for name in (BUDGET, PIN_TOKENS):
            if name in asked:
                raise ConfigError(name, asked[name], f"it has no effect with {POLICY} {NO_POLICY}", "Drop it")
        return cls(policy.no_budget_tokens, policy.pinned_blocks)


def ranges(policy: KVPolicyConfig) -> dict[str, tuple[int, int]]:
    """The least and the most that one limit may be, in tokens, where the other is the server's."""
    block_size = policy.block_size
    least = -(-(policy.pinned_tokens + policy.recent_tokens + block_size) // block_size) * block_size
    most_pinned = (policy.budget_tokens - policy.recent_tokens - block_size) // block_size * block_size
    return {BUDGET: (least, policy.budget_tokens), PIN_TOKENS: (policy.pinned_tokens, most_pinned)}


_LONGEST_NEAR_MISS = 21
"""Characters: a longer name isn't like any of ours in three quarters of its letters."""

_NAMES_CHECKED = 32
"""Of others' arguments that begin as ours do: a request may have any number, and each takes ten microseconds
here, in the scheduler, and in every worker."""


def _check_names(extra_args: Mapping[str, Any]) -> None:
    """Others may have arguments of their own; one that nearly is ours would be ignored without a word."""
    others = (
        name
        for name in extra_args
        if name.startswith("kv_") and len(name) <= _LONGEST_NEAR_MISS and name not in FIELDS
    )
    for name in islice(others, _NAMES_CHECKED):
        close = get_close_matches(name, FIELDS, n=1, cutoff=0.75)
        if close:
            known = ", ".join(FIELDS)
            raise ConfigError(
                name, extra_args[name], "there is no such argument", f"Write {close[0]}; known: {known}"
            )


@dataclass(frozen=True)
class RowLimits:
    """Limits of a step's rows, ``[num_rows]`` int64 each; as in ``RequestLimits``."""

    budget_tokens: IntArray
    pinned_blocks: IntArray
    prompt_budget_tokens: IntArray
    num_prompt_tokens: IntArray

    @classmethod
    def of(cls, limits: Sequence[RequestLimits]) -> Self:
        return cls(*np.array(limits, dtype=np.int64).reshape(-1, len(fields(cls))).T)

    def padded(self, num_rows: int, padding: RequestLimits) -> Self:
        """With rows of ``padding`` behind."""
        columns = zip((getattr(self, field.name) for field in fields(self)), padding, strict=True)
        missing = num_rows - self.budget_tokens.size
        return type(self)(*(np.append(column, np.full(missing, value)) for column, value in columns))

    @classmethod
    def alike(cls, num_rows: int, limits: RequestLimits) -> Self:
        """The same for every row."""
        return cls(*(np.full(num_rows, value) for value in limits))

    def budget_at(self, num_tokens: IntArray) -> IntArray:
        """Each row's budget once it has ``num_tokens``."""
        return retention.budget_at(
            num_tokens,
            budget_tokens=self.budget_tokens,
            prompt_budget_tokens=self.prompt_budget_tokens,
            num_prompt_tokens=self.num_prompt_tokens,
        )


class RequestTable:
    """Limits of the requests that a process knows, of those that have others than the policy itself."""

    def __init__(self, policy: KVPolicyConfig) -> None:
        self._policy = policy
        self._default = RequestLimits.of_policy(policy)
        self._limits: dict[str, RequestLimits] = {}

    def __len__(self) -> int:
        return len(self._limits)

    def add(
        self, request_id: str, extra_args: Mapping[str, Any] | None, num_prompt_tokens: int
    ) -> ConfigError | None:
        """Note a request.

        Returns:
            What is wrong with its arguments, which the front end has checked unless somebody went around it:
            it then has the policy's own limits, in every process.
        """
        wrong = None
        try:
            limits = RequestLimits.of_request(extra_args, self._policy)
        except ConfigError as error:
            limits, wrong = self._default, error
        prompt_budget = self._policy.prompt_budget_tokens
        if prompt_budget is not None and limits.budget_tokens < prompt_budget:
            limits = limits._replace(prompt_budget_tokens=prompt_budget, num_prompt_tokens=num_prompt_tokens)
        if limits != self._default:
            self._limits[request_id] = limits
        return wrong

    def forget(self, request_ids: Iterable[str]) -> None:
        if self._limits:
            for request_id in request_ids:
                self._limits.pop(request_id, None)

    def of(self, request_id: str) -> RequestLimits:
        return self._limits.get(request_id, self._default) if self._limits else self._default

    def rows(self, request_ids: Sequence[str]) -> RowLimits | None:
        """Limits in the order of ``request_ids``; None if all have the policy's."""
        if not self._limits:
            return None
        limits = [self.of(request_id) for request_id in request_ids]
        return RowLimits.of(limits)
