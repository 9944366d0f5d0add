"""What the user wrote, checked and turned into the one configuration (``vllm_h2o.config``).

Two sources, flags and ``additional_config``, become one ``KVPolicySettings``; ``resolve`` turns its fractions
into tokens and checks every limit once the model's length is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypeVar

from vllm_h2o import policies
from vllm_h2o.config import CONFIG_KEY, GRANULARITIES, KERNEL_CHOICES, KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.parsing import num_tokens, number, whole_number
from vllm_h2o.policies.base import Policy

_Choice = TypeVar("_Choice", bound=str)

_OF_SOME_POLICIES = frozenset({"recent", "score_half_life", "score_pool", "score_window", "score_rank"})
"""Settings that a policy has to name in ``Policy.settings``."""


@dataclass(frozen=True, kw_only=True)
class KVPolicySettings:
    """Settings as written; None means not given.

    Field ``x`` is flag ``--kv-x``, ``name`` is ``--kv-policy``; the last two have no flag.
    """

    name: str | None = None
    preset: str | None = None
    budget: int | float | str | None = None
    prompt_budget: int | float | str | None = None
    recent: int | float | str | None = None
    pin_tokens: int | None = None
    granularity: str | None = None
    score_half_life: float | str | None = None
    score_pool: int | None = None
    score_window: int | None = None
    score_rank: str | None = None
    kernels: str | None = None
    trace: bool | None = None

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Settings under ``additional_config["kv_policy"]``: a dict of the fields, or just the name."""
        if not isinstance(additional_config, Mapping):
            return cls()  # vLLM says what is wrong with it
        for key in additional_config:
            # vLLM takes any key here, so a near miss would serve without a policy.
            letters = "".join(char for char in str(key).lower() if char.isalpha())
            if key != CONFIG_KEY and letters in ("kvpolicy", "kvpolicies"):
                raise ConfigError(
                    f"additional_config.{key}", additional_config[key], "there is no such key",
                    f"Write it {CONFIG_KEY}",
                )  # fmt: skip
        given = additional_config.get(CONFIG_KEY)
        if given is None:
            return cls()
        if isinstance(given, str):
            return cls(name=given)
        known = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config.{CONFIG_KEY}", given, "it must be a name or a mapping",
                f"Write {{{CONFIG_KEY}: {{name: h2o, budget: 512}}}}",
            )  # fmt: skip
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"additional_config.{CONFIG_KEY}.{key}", given[key], "there is no such setting",
                    f"Known: {', '.join(known)}",
                )  # fmt: skip
        return cls(**given)

    @classmethod
    def require_name(cls, additional_config: object) -> None:
        """Raise a ConfigError if ``additional_config`` has a policy without a name: it would do nothing."""
        given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        if given is not None and cls.from_additional_config(additional_config).name is None:
            raise ConfigError(
                f"additional_config.{CONFIG_KEY}", given, "it names no policy",
                "Add name: h2o, or leave it out",
            )  # fmt: skip

    @classmethod
    def merge(cls, flags: "KVPolicySettings", additional: "KVPolicySettings") -> Self:
        """One set of settings from two sources, which may not contradict each other."""
        merged: dict[str, Any] = {}
        for field in fields(cls):
            by_flag, by_config = getattr(flags, field.name), getattr(additional, field.name)
            if by_flag is not None and by_config is not None and str(by_flag) != str(by_config):
                raise ConfigError(
                    flag_of(field.name), by_flag,
                    f"additional_config.{CONFIG_KEY}.{field.name} says {by_config!r}",
                    "Give it in one place only",
                )  # fmt: skip
            merged[field.name] = by_config if by_flag is None else by_flag
        settings = cls(**merged)
        if settings.name is None:
            for name, value in merged.items():
                if value is not None:
                    raise ConfigError(
                        flag_of(name), value, "it has no effect without --kv-policy",
                        "Add --kv-policy h2o, or drop it",
                    )  # fmt: skip
        return settings

    def resolve(
        self, *, max_model_len: int, block_size: int, max_in_flight_tokens: int
    ) -> tuple[KVPolicyConfig, list[str]]:
        """Check every setting and turn it into tokens.

        Returns:
            The configuration, and notes on what was changed from the user's words (for the log).

        Raises:
            ConfigError: names the setting, its value, the limit and the fix.
        """
        policy = policies.load(str(self.name))
        return self._of_policy(policy)._resolve(
            policy,
            max_model_len=max_model_len,
            block_size=block_size,
            max_in_flight_tokens=max_in_flight_tokens,
        )

    def _resolve(
        self, policy: type[Policy], *, max_model_len: int, block_size: int, max_in_flight_tokens: int
    ) -> tuple[KVPolicyConfig, list[str]]:
        """``resolve``, once every setting of the policy has a value."""
        notes: list[str] = []
        budget = num_tokens("--kv-budget", 0.2 if self.budget is None else self.budget, max_model_len)
        rounded = -(-budget // block_size) * block_size
        if rounded != budget:
            notes.append(
                f"budget {budget} rounded up to {rounded} tokens (a multiple of block size {block_size})"
            )
        pin_tokens = (
            block_size if self.pin_tokens is None else whole_number("--kv-pin-tokens", self.pin_tokens, 0)
        )
        pinned_blocks = -(-pin_tokens // block_size)
        if pinned_blocks * block_size != pin_tokens:
            notes.append(
                f"pinned tokens {pin_tokens} rounded up to {pinned_blocks * block_size} (whole blocks)"
            )
        config = KVPolicyConfig(
            name=str(self.name),
            block_size=block_size,
            budget_tokens=rounded,
            recent_tokens=self._recent_tokens(rounded),
            pinned_blocks=pinned_blocks,
            granularity=_one_of("--kv-granularity", self.granularity, GRANULARITIES),
            score_half_life_tokens=self._half_life(),
            score_pool=self._pool(rounded),
            score_window_tokens=self._window(block_size),
            prompt_budget_tokens=self._prompt_budget(rounded, max_model_len, block_size),
            rank_by=_one_of("--kv-score-rank", self.score_rank, policy.ranks),
            max_model_len=max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            kernels=_one_of(flag_of("kernels"), self.kernels, KERNEL_CHOICES),
            trace=self._trace(),
        )
        if not config.evicts:
            if rounded > max_model_len:
                notes.append(
                    f"budget {rounded} is over max_model_len {max_model_len}: nothing is ever evicted"
                )
        elif _room(config) < block_size:
            smallest = self._smallest_budget(config)
            default = f" (the default, 0.2 of --max-model-len {max_model_len})" if self.budget is None else ""
            raise ConfigError(
                "--kv-budget",
                budget if self.budget is None else self.budget,
                f"{rounded} tokens{default} can't hold {config.pinned_tokens} pinned + "
                f"{config.recent_tokens} recent + one block of {block_size}",
                f"Give at least {smallest}"
                if smallest
                else "Lower --kv-recent or --kv-pin-tokens: no budget below max_model_len "
                f"{max_model_len} can hold them",
            )
        return config, notes

    def _of_policy(self, policy: type[Policy]) -> Self:
        """These settings with the policy's own defaults.

        Raises:
            ConfigError: one is given that the policy doesn't use.
        """
        for field in _OF_SOME_POLICIES - policy.settings:
            value = getattr(self, field)
            if value is not None:
                used = sorted(flag_of(name) for name in policy.settings)
                raise ConfigError(
                    flag_of(field), value, f"it has no effect under --kv-policy {self.name}",
                    f"Drop it. This policy uses {', '.join(used) or 'no such flag'}",
                )  # fmt: skip
        filled = {**policy.defaults, **self._preset(policy)}
        missing = {name: value for name, value in filled.items() if getattr(self, name) is None}
        return replace(self, **missing)

    def _preset(self, policy: type[Policy]) -> Mapping[str, Any]:
        if self.preset is None:
            return {}
        if str(self.preset) not in policy.presets:
            known = ", ".join(sorted(policy.presets))
            raise ConfigError(
                "--kv-preset", self.preset, f"--kv-policy {self.name} has no such preset",
                f"Use one of {known}" if known else "Leave it out",
            )  # fmt: skip
        return policy.presets[self.preset]

    def _recent_tokens(self, budget_tokens: int) -> int:
        return num_tokens(
            "--kv-recent", 0.5 if self.recent is None else self.recent, budget_tokens, minimum=0
        )

    def _prompt_budget(self, budget_tokens: int, max_model_len: int, block_size: int) -> int | None:
        if self.prompt_budget is None:
            return None
        given = num_tokens("--kv-prompt-budget", self.prompt_budget, max_model_len)
        # No more than the longest prompt: the number has to fit into arrays.
        rounded = -(-min(given, max(max_model_len, budget_tokens)) // block_size) * block_size
        if rounded < budget_tokens:
            raise ConfigError(
                "--kv-prompt-budget", self.prompt_budget,
                f"{rounded} tokens are under the budget of {budget_tokens}",
                f"Give at least {budget_tokens}, or leave it out to have that",
            )  # fmt: skip
        return rounded if rounded > budget_tokens else None

    def _trace(self) -> bool:
        if self.trace not in (None, True, False):
            raise ConfigError(flag_of("trace"), self.trace, "it must be true or false", "Leave it out")
        return bool(self.trace)

    def _half_life(self) -> float | None:
        if self.score_half_life in (None, "none"):
            return None
        value = number("--kv-score-half-life", self.score_half_life)
        if value <= 0:
            raise ConfigError(
                "--kv-score-half-life", self.score_half_life, "it must be a positive number of tokens",
                "Give none for the paper's plain sum",
            )  # fmt: skip
        return value

    def _pool(self, budget_tokens: int) -> int:
        pool = 1 if self.score_pool is None else whole_number("--kv-score-pool", self.score_pool, 1)
        if pool % 2 == 0:
            raise ConfigError(
                "--kv-score-pool", pool, "it must be odd, so that the window has a centre",
                f"Use {pool - 1} or {pool + 1}",
            )  # fmt: skip
        if pool > budget_tokens:
            # Every token would rank alike, and the work grows with the window.
            raise ConfigError(
                "--kv-score-pool", pool, f"it is wider than the budget of {budget_tokens} tokens",
                "Use a few tokens, such as 15",
            )  # fmt: skip
        return pool

    def _window(self, block_size: int) -> int | None:
        if self.score_window is None:
            return None
        window = whole_number("--kv-score-window", self.score_window, 1)
        if window > block_size:
            # In decode the queries of one block are kept, so there are never more.
            raise ConfigError(
                "--kv-score-window", window, f"it is over the block size of {block_size} tokens",
                f"Give at most {block_size}, or a larger --block-size",
            )  # fmt: skip
        return window

    def _smallest_budget(self, config: KVPolicyConfig) -> int | None:
        """The smallest budget that evicts and would be accepted; None if there is none."""
        block_size = config.block_size
        for budget in range(block_size, config.max_model_len, block_size):
            if budget - config.pinned_tokens - self._recent_tokens(budget) >= block_size:
                return budget
        return None


def _one_of(setting: str, given: str | None, choices: tuple[_Choice, ...]) -> _Choice:
    """The choice that was given; the first one if none was."""
    for choice in choices:
        if given in (None, choice):
            return choice
    raise ConfigError(setting, given, "it is not known", f"Use one of {', '.join(choices)}")


def _room(config: KVPolicyConfig) -> int:
    return config.budget_tokens - config.pinned_tokens - config.recent_tokens


def flag_of(field: str) -> str:
    """What users call a field of ``KVPolicySettings``: its command-line flag, where it has one."""
    if field in ("kernels", "trace"):
        return f"{CONFIG_KEY}.{field}"
    return "--kv-policy" if field == "name" else "--kv-" + field.replace("_", "-")
