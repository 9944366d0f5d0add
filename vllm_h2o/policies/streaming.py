"""StreamingLLM: the first tokens and the newest ones stay."""

from typing import ClassVar

from vllm_h2o.policies.base import Policy


class StreamingPolicy(Policy):
    """Attention sinks and a window (StreamingLLM, arXiv 2309.17453, section 3.2): the oldest token goes.

    Formula: rank = position. Direction: higher = keep. The sinks are ``--kv-pin-tokens``, the window is the
    rest of the budget. Cost: none; the oldest tokens lie in the very blocks that are freed, so nothing is
    scored, stored or moved.

    The paper gives the tokens in the cache new, adjacent positions. Here they keep their own, as under every
    policy (see the README), so contexts are limited to what the model's positions reach.

    Limits: everything between the sinks and the window is forgotten.
    """

    ranks = ("age",)
    defaults: ClassVar = {"recent": 0}
