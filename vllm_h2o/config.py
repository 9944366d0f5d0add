"""What the user asks for, parsed once into one frozen object that is the same in every process.

``KVPolicySettings`` holds what was written (flags or ``additional_config``), before the model is known.
``KVPolicySettings.resolve`` turns fractions into tokens and checks every limit; its result,
``KVPolicyConfig``, travels to the scheduler and the workers as a plain dict inside vLLM's
``additional_config`` and is rebuilt there unchanged.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, TypeVar

from vllm_h2o import policies, retention
from vllm_h2o.errors import ConfigError
from vllm_h2o.parsing import num_tokens, number, whole_number

CONFIG_KEY = "kv_policy"
"""Key of ``additional_config`` under which settings and, later, the resolved configuration live."""

Granularity = Literal["token", "block"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "block")

KernelChoice = Literal["auto", "native", "torch"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = ("auto", "native", "torch")

_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True, kw_only=True)
class KVPolicyConfig:
    """The effective policy; every length is in tokens and already checked.

    Attributes:
        name: registry key of the policy (``vllm_h2o.policies``).
        block_size: tokens in a KV cache block.
        budget_tokens: the most live tokens a request keeps after a step, a multiple of ``block_size``.
        recent_tokens: newest tokens that are never dropped.
        pinned_blocks: leading blocks that are never dropped (and the only ones prefix caching shares).
        granularity: drop single tokens, or whole blocks by the sum of their tokens' ranks.
        score_half_life_tokens: age at which an attention probability counts half; None = plain sum.
        score_pool: a token ranks by the maximum over this odd number of neighbours; 1 = off.
        max_model_len: longest sequence the server accepts.
        max_in_flight_tokens: most tokens that vLLM schedules before the first of them is settled.
        kernels: compiled kernels (``native``), tensor operations (``torch``), or ``auto``: native where they
            can be compiled.
        trace: debugging: record the position of every slot, and what each compaction kept.
    """

    name: str
    block_size: int
    budget_tokens: int
    recent_tokens: int
    pinned_blocks: int
    granularity: Granularity
    score_half_life_tokens: float | None
    score_pool: int
    max_model_len: int
    max_in_flight_tokens: int
    kernels: KernelChoice = "auto"
    trace: bool = False

    @property
    def pinned_tokens(self) -> int:
        return self.pinned_blocks * self.block_size

    @property
    def evicts(self) -> bool:
        """False when no request can grow past the budget: then nothing needs scoring either."""
        return self.budget_tokens < self.max_model_len

    @property
    def max_blocks_per_request(self) -> int:
        """Bound on the blocks one request holds at any time; start-up sizing and admission both use it."""
        return retention.max_blocks_held(
            budget_tokens=self.budget_tokens,
            block_size=self.block_size,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_model_len=self.max_model_len,
        )

    @property
    def tracks_positions(self) -> bool:
        """Whether slots remember the position of their token (after moves, slot order is not age order)."""
        return self.score_pool > 1 or self.trace

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self | None:
        """The resolved configuration that the front end put there; None when no policy is active."""
        resolved = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        return None if resolved is None else cls(**resolved)


@dataclass(frozen=True, kw_only=True)
class KVPolicySettings:
    """Settings as written; None means not given.

    Field ``x`` is flag ``--kv-x``, ``name`` is ``--kv-policy``; the last two have no flag.
    """

    name: str | None = None
    budget: int | float | str | None = None
    recent: int | float | str | None = None
    pin_tokens: int | None = None
    granularity: str | None = None
    score_half_life: float | None = None
    score_pool: int | None = None
    kernels: str | None = None
    trace: bool | None = None

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Settings under ``additional_config["kv_policy"]``: a dict of the fields, or just the name."""
        if not isinstance(additional_config, Mapping):
            return cls()
        for key in additional_config:
            # vLLM takes any key here, so a near miss would serve without a policy.
            if key != CONFIG_KEY and str(key).replace("-", "_").lower() == CONFIG_KEY:
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
        notes: list[str] = []
        name = str(self.name)
        policies.require_known(name)
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
            name=name,
            block_size=block_size,
            budget_tokens=rounded,
            recent_tokens=self._recent_tokens(rounded),
            pinned_blocks=pinned_blocks,
            granularity=_one_of("--kv-granularity", self.granularity, GRANULARITIES),
            score_half_life_tokens=self._half_life(),
            score_pool=self._pool(),
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
            raise ConfigError(
                "--kv-budget",
                budget if self.budget is None else self.budget,
                f"{rounded} tokens can't hold {config.pinned_tokens} pinned + {config.recent_tokens} recent "
                f"+ one block of {block_size}",
                f"Give at least {smallest}"
                if smallest
                else "Lower --kv-recent or --kv-pin-tokens: no budget below max_model_len "
                f"{max_model_len} can hold them",
            )
        return config, notes

    def _recent_tokens(self, budget_tokens: int) -> int:
        return num_tokens(
            "--kv-recent", 0.5 if self.recent is None else self.recent, budget_tokens, minimum=0
        )

    def _trace(self) -> bool:
        if self.trace not in (None, True, False):
            raise ConfigError(flag_of("trace"), self.trace, "it must be true or false", "Leave it out")
        return bool(self.trace)

    def _half_life(self) -> float | None:
        if self.score_half_life is None:
            return None
        value = number("--kv-score-half-life", self.score_half_life)
        if value <= 0:
            raise ConfigError(
                "--kv-score-half-life", self.score_half_life, "it must be a positive number of tokens",
                "Leave it out for the paper's plain sum",
            )  # fmt: skip
        return value

    def _pool(self) -> int:
        pool = 1 if self.score_pool is None else whole_number("--kv-score-pool", self.score_pool, 1)
        if pool % 2 == 0:
            raise ConfigError(
                "--kv-score-pool", pool, "it must be odd, so that the window has a centre",
                f"Use {pool - 1} or {pool + 1}",
            )  # fmt: skip
        return pool

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
