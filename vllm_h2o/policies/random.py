"""Random: the control that every other policy has to beat."""

from vllm_h2o.policies.base import Policy


class RandomPolicy(Policy):
    """Each token draws a number when it comes, and the lowest numbers go.

    Formula: rank = a hash of (position, layer, KV head), the same in every run. Direction: higher = keep.
    What is kept beside the pinned and recent tokens (``--kv-recent 0.5``, as for ``h2o``) is therefore a
    sample of all past tokens in which each is as likely as any other. Cost: none but the moves.
    """

    ranks = ("random",)
    settings = frozenset({"recent"})
