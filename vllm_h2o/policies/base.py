"""What a policy decides: how much each query's attention adds to the score of the keys it saw."""

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from vllm_h2o.config import KVPolicyConfig

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


class Policy(ABC):
    """Scores are sums over queries of ``weight * attention probability``; higher = keep.

    Both methods see lengths only, so they run once per step on the host, for all layers and heads.
    """

    def __init__(self, config: KVPolicyConfig) -> None:
        self.config = config

    @abstractmethod
    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        """Weight of each query by its age in tokens (0 = the newest one of its flush); any shape."""

    @abstractmethod
    def decay(self, num_queries: IntArray) -> FloatArray:
        """Factor on the stored scores before the sums of ``num_queries`` newer queries are added."""
