"""TOVA: what the last query attends to stays."""

from typing import ClassVar

import numpy as np

from vllm_h2o.policies.base import AttentionPolicy, FloatArray, IntArray


class TOVAPolicy(AttentionPolicy):
    """Token Omission Via Attention (arXiv 2401.06104, section 3.2): score = the last query's attention.

    Formula: ``p(last query, token)``, summed over the query heads of its KV head. Direction: higher = keep.
    No recent window (``--kv-recent 0``). Cost: one query per prompt chunk and per block.

    The paper averages over all heads of a layer; here each KV head decides for itself, as under every
    policy, and a block's worth of tokens goes at once, when a block is full.
    """

    defaults: ClassVar = {"recent": 0}

    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        return (ages_tokens < 1).astype(np.float32)

    def decay(self, num_queries: IntArray) -> FloatArray:
        return (num_queries < 1).astype(np.float32)

    def num_scored(self, num_queries: IntArray) -> IntArray:
        return np.minimum(num_queries, 1)
