"""H2O: heavy hitters by accumulated attention, next to a recent window."""

import math
from typing import ClassVar

import numpy as np

from vllm_h2o.policies.base import AttentionPolicy, FloatArray, IntArray

_FLOAT32_BITS = 24
_NO_LIMIT = np.iinfo(np.int64).max


class H2OPolicy(AttentionPolicy):
    """Heavy-Hitter Oracle (arXiv 2306.14048, section 4): score = sum of the attention a token received.

    Formula: ``sum over queries that saw the token of p(query, token)``, summed over the query heads of its
    KV head; survivors keep their sum, evicted tokens forget theirs. Direction: higher = keep. Cost: one more
    pass over Q and K, with a half-life ``h`` over the newest ``24 h`` queries of a prompt's chunk only.

    With a half-life ``h`` a query that is ``a`` tokens old counts ``0.5 ** (a / h)``, which is applied as a
    decay of the stored sums and is exact for prefill and decode alike. Queries of a chunk that are 24
    half-lives old or more count less than the rounding of float32, and aren't scored.

    ``--kv-score-rank mean`` divides a sum by the weights of all queries that saw the token, which takes
    away the lead of old tokens (the paper's appendix B.2 found it worse); ``value`` multiplies it by the L1
    norm of the token's value (VATP, arXiv 2406.12335), so that tokens which are looked at but add next to
    nothing to the output may go.

    The defaults are what did best in docs/quality.md. The paper is the preset ``paper``: plain sums, no
    pooling, half of the budget for the newest tokens, nothing pinned. Plain sums favour tokens that were
    attended to early and often, and lose a fact that only the last question asks for.
    """

    ranks = ("sum", "mean", "value")
    settings = frozenset({"recent", "score_half_life", "score_pool", "score_rank"})
    defaults: ClassVar = {"recent": 0.1, "score_half_life": 32, "score_pool": 15, "score_rank": "value"}
    presets: ClassVar = {
        "paper": {
            "recent": 0.5,
            "pin_tokens": 0,
            "granularity": "token",
            "score_half_life": "none",
            "score_pool": 1,
            "score_rank": "sum",
        }
    }

    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        return np.where(ages_tokens < self._oldest, self.decay(ages_tokens), 0).astype(np.float32)

    def decay(self, num_queries: IntArray) -> FloatArray:
        half_life = self.config.score_half_life_tokens
        if half_life is None:
            return np.ones(num_queries.shape, dtype=np.float32)
        return np.exp2(-num_queries / half_life).astype(np.float32)

    def num_scored(self, num_queries: IntArray) -> IntArray:
        return np.minimum(num_queries, self._oldest)

    @property
    def _oldest(self) -> int:
        """Age in tokens from which a query counts less than float32 tells 1 from what is next to it."""
        half_life = self.config.score_half_life_tokens
        return _NO_LIMIT if half_life is None else math.ceil(_FLOAT32_BITS * half_life)
