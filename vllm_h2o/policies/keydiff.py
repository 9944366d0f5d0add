"""KeyDiff: tokens whose keys are unlike the others stay; attention is never looked at."""

from typing import ClassVar

from vllm_h2o.policies.base import Policy


class KeyDiffPolicy(Policy):
    """KeyDiff (arXiv 2504.15364, section 3): keep the keys that differ most from the average key.

    Formula: ``1 - cos(k, m)`` with ``m`` the mean of the normalised keys of all live tokens of the KV head,
    keys as they are cached (with their rotation). Direction: higher = keep. No recent window
    (``--kv-recent 0``). Cost: one pass over the live keys per compaction, nothing in between.

    Limits: it doesn't know what is asked, which makes it the same for every question.
    """

    ranks = ("keys",)
    settings = frozenset({"recent", "score_pool"})
    defaults: ClassVar = {"recent": 0}
