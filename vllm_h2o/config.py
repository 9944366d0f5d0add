"""The effective policy: one frozen object that is the same in every process.

``vllm_h2o.settings`` makes it from what the user wrote. It travels to the scheduler and the workers as a
plain dict inside vLLM's ``additional_config`` and is rebuilt there unchanged.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self

from vllm_h2o import retention

CONFIG_KEY = "kv_policy"
"""Key of ``additional_config`` under which settings and, later, the resolved configuration live."""

Granularity = Literal["token", "block"]
GRANULARITIES: tuple[Granularity, ...] = ("token", "block")

RankBy = Literal["sum", "mean", "value", "keys", "random", "age"]
RANKS: tuple[RankBy, ...] = ("sum", "mean", "value", "keys", "random", "age")
"""What a token ranks by when tokens are dropped: its score, that per query, that times the norm of its value,
how unlike the others its key is, a number drawn when it came, or its position."""

ATTENTION_RANKS = RANKS[:3]
"""Those that come from scores, so that queries have to be kept and scored."""

KernelChoice = Literal["auto", "native", "torch", "triton"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = ("auto", "native", "torch", "triton")


@dataclass(frozen=True, kw_only=True)
class KVPolicyConfig:
    """The effective policy; every length is in tokens and already checked.

    Attributes:
        name: registry key of the policy (``vllm_h2o.policies``).
        block_size: tokens in a KV cache block.
        budget_tokens: the most live tokens a request keeps after a step, a multiple of ``block_size``.
        prompt_budget_tokens: the same while a request's prompt is being read, where that may be more; None if
            not.
        recent_tokens: newest tokens that are never dropped.
        pinned_blocks: leading blocks that are never dropped; requests share them through the prefix cache.
        granularity: drop single tokens, or whole blocks by the sum of their tokens' ranks.
        score_half_life_tokens: age at which an attention probability counts half; None = plain sum.
        score_pool: a token ranks by the maximum over this odd number of neighbours; 1 = off.
        score_window_tokens: newest queries whose attention counts, for policies that have such a limit.
        rank_by: what a token ranks by.
        max_model_len: longest sequence the server accepts.
        max_in_flight_tokens: most tokens that vLLM schedules before the first of them is settled.
        kernels: compiled kernels (``native``), tensor operations (``torch``), kernels for GPUs (``triton``),
            or ``auto``: on a GPU those, on a CPU native where they can be compiled.
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
    score_window_tokens: int | None = None
    prompt_budget_tokens: int | None = None
    rank_by: RankBy = "sum"
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
    def no_budget_tokens(self) -> int:
        """The budget of a request that loses nothing: a block more than any sequence has."""
        return (-(-self.max_model_len // self.block_size) + 1) * self.block_size

    @property
    def max_blocks_per_request(self) -> int:
        """Bound on the blocks one request holds at any time; start-up sizing and admission both use it."""
        return retention.max_blocks_held(
            budget_tokens=self.prompt_budget_tokens or self.budget_tokens,
            block_size=self.block_size,
            max_in_flight_tokens=self.max_in_flight_tokens,
            max_model_len=self.max_model_len,
        )

    @property
    def tracks_positions(self) -> bool:
        """Whether slots remember the position of their token (after moves, slot order is not age order)."""
        return self.score_pool > 1 or self.rank_by == "mean" or self.trace

    @property
    def scores_attention(self) -> bool:
        """Whether queries are kept and scored."""
        return self.rank_by in ATTENTION_RANKS

    def describe_ranks(self) -> str:
        """What decides which tokens stay, in words of the settings."""
        if self.rank_by == "age":
            return "the oldest tokens go"
        parts = [f"recent {self.recent_tokens}", f"rank by {self.rank_by}"]
        if self.scores_attention:
            parts.append(f"score half-life {self.score_half_life_tokens or 'none'}")
        if self.score_window_tokens is not None:
            parts.append(f"window {self.score_window_tokens}")
        return ", ".join([*parts, f"pool {self.score_pool}"])

    @property
    def compacts(self) -> bool:
        """Whether tokens move at all; by age the ones to go lie in the freed blocks already."""
        return self.rank_by != "age" or self.trace

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self | None:
        """The resolved configuration that the front end put there; None when no policy is active."""
        resolved = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        return None if resolved is None else cls(**resolved)
