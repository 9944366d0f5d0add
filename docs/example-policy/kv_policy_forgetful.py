"""An eviction policy of its own distribution: attention counts half after 64 tokens."""

from typing import ClassVar

import numpy as np

from vllm_h2o.policies.base import AttentionPolicy, FloatArray, IntArray

HALF_LIFE_TOKENS = 64


class ForgetfulPolicy(AttentionPolicy):
    """Formula: sum over queries of ``0.5 ** (age / 64) * p(query, token)``. Direction: higher = keep.

    Cost: every query is scored, as under ``h2o``.
    """

    settings = frozenset({"recent", "score_pool"})
    defaults: ClassVar = {"recent": 16, "score_pool": 5}

    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        return np.exp2(-ages_tokens / HALF_LIFE_TOKENS).astype(np.float32)

    def decay(self, num_queries: IntArray) -> FloatArray:
        # What was stored has become older by that many tokens.
        return self.query_weights(num_queries)
