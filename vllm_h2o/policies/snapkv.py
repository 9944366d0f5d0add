"""SnapKV: attention of the last queries only, pooled over neighbours."""

from typing import ClassVar

import numpy as np

from vllm_h2o.policies.base import AttentionPolicy, FloatArray, IntArray


class SnapKVPolicy(AttentionPolicy):
    """SnapKV (arXiv 2404.14469, section 4): score = attention received from the last ``W`` queries.

    Formula: ``sum over the last W queries of p(query, token)``, then the maximum over ``--kv-score-pool``
    neighbours (7). Direction: higher = keep. ``W`` is ``--kv-score-window`` (32), and as many newest tokens
    are kept. Cost: ``W`` queries per prompt chunk and per block, a fraction of ``h2o``.

    The paper cuts the prompt once and keeps all that is generated. Here decoding goes on in the same way:
    each filled block's last ``W`` queries replace what was known before. A flush of fewer than ``W``
    queries (the rest of a block behind a prompt) is added to what was known.

    Limits: what the last queries don't ask for is forgotten, so a question that comes later finds less
    than under ``h2o``.
    """

    settings = frozenset({"recent", "score_pool", "score_window"})
    defaults: ClassVar = {"score_pool": 7, "score_window": 32, "recent": 32}

    def query_weights(self, ages_tokens: IntArray) -> FloatArray:
        return (ages_tokens < self._window).astype(np.float32)

    def decay(self, num_queries: IntArray) -> FloatArray:
        return (num_queries < self._window).astype(np.float32)

    def num_scored(self, num_queries: IntArray) -> IntArray:
        return np.minimum(num_queries, self._window)

    @property
    def _window(self) -> int:
        assert self.config.score_window_tokens is not None
        return self.config.score_window_tokens
