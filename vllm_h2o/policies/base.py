"""What a policy says: what a token ranks by, and which queries' attention counts how much."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vllm_h2o.config import KVPolicyConfig, RankBy

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Policy:
    """The lowest ranks are dropped; pinned and recent tokens are never asked.

    Attributes:
        ranks: what a token may rank by under this policy (``vllm_h2o.config.RANKS``), the default first.
        settings: names of the settings that it uses beside budget, pinned tokens and granularity; others
            are refused.
        defaults: values of settings where they differ from the general ones.
        presets: named sets of settings that take the place of the defaults (``--kv-preset``).
    """

    ranks: ClassVar[tuple[RankBy, ...]]
    settings: ClassVar[frozenset[str]] = frozenset()
    defaults: ClassVar[Mapping[str, Any]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, config: KVPolicyConfig) -> None:
        self.config = config


class AttentionPolicy(Policy, ABC):
    """Ranks come from scores: sums over queries of ``weight * attention probability``.

    The methods see lengths only, so they run once per step on the host, for all layers and heads. Queries
    are scored in flushes: those of a prompt's chunk, or those since the tail block was started.
    """

    ranks: ClassVar[tuple[RankBy, ...]] = ("sum",)
    settings = frozenset({"recent", "score_pool"})

    @abstractmethod
    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        """Weight of each query by its age in tokens (0 = the newest one of its flush); any shape."""

    @abstractmethod
    def decay(self, num_queries: IntArray) -> FloatArray:
        """Factor on the stored scores before the sums of ``num_queries`` newer queries are added."""

    def num_scored(self, num_queries: IntArray) -> IntArray:
        """How many of a flush's newest queries have a weight above 0; the others cost nothing."""
        return num_queries

    def total_weights(self) -> FloatArray:
        """``[max_model_len]``: entry ``n - 1`` is the weight of all of a token's ``n`` queries together."""
        ages = np.arange(self.config.max_model_len)
        return np.cumsum(self.query_weights(ages), dtype=np.float64).astype(np.float32)
