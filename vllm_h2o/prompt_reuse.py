"""Which blocks of a request later ones may take from the prefix cache. It knows no vLLM.

Pinned blocks never change, so requests share them. Two more kinds of block hold the KV of the full text when
their request gives them back, and are offered to later requests:

    all that is computed of a request that has lost nothing
    what goes at the end of a prompt that was read whole (``--kv-prompt-budget``): the cut moves survivors
    into the blocks that stay, and only reads those that go

A later request gets copies of its own, because it will drop other tokens of them. A copy brings no scores
along, which came from queries of another request. So a request computes as many of its prompt's newest
tokens itself as its policy looks at, and then keeps the same tokens as if it had computed them all.
"""

import numpy as np

from vllm_h2o import policies, retention
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.policies.base import AttentionPolicy
from vllm_h2o.request_limits import RequestLimits


class PromptReuse:
    """The rule for one policy; lengths are in tokens since the beginning of a request.

    Attributes:
        is_on: whether anything beyond the pinned tokens may be reused.
    """

    def __init__(self, config: KVPolicyConfig) -> None:
        self._config = config
        policy = policies.create(config)
        self._num_scored = 1  # the last token always has to be computed, for what comes next
        if isinstance(policy, AttentionPolicy):
            self._num_scored = int(policy.num_scored(np.array(config.max_model_len)))
        # Where every query counts for ever, none may be left out.
        self.is_on = config.evicts and self._num_scored < config.max_model_len

    def offered_tokens(
        self, limits: RequestLimits, *, num_prompt_tokens: int, num_computed_tokens: int
    ) -> int:
        """First tokens whose blocks are as they were computed, and will not change any more.

        Args:
            num_computed_tokens: of the request that gives blocks back, with what is being computed.
        """
        block_size = self._config.block_size
        if not limits.evicted_blocks(num_computed_tokens, block_size):
            return num_computed_tokens
        if num_computed_tokens < num_prompt_tokens or limits.prompt_budget_tokens < num_prompt_tokens:
            return self._config.pinned_tokens
        gone = retention.evicted_blocks(
            num_prompt_tokens, budget_tokens=limits.budget_tokens, block_size=block_size
        )
        return (limits.pinned_blocks + gone) * block_size if gone else self._config.pinned_tokens

    def usable_tokens(self, limits: RequestLimits, *, num_prompt_tokens: int, most_tokens: int) -> int:
        """First tokens of a request that it need not compute, if others have; at least the pinned ones.

        Args:
            most_tokens: of prompt and answer together.
        """
        if limits.evicted_blocks(most_tokens, self._config.block_size):
            own = num_prompt_tokens - self._num_scored
            # It starts with all of them, so the rule must not have dropped any by then.
            whole = max(limits.budget_tokens, limits.prompt_budget_tokens) - 1
            return max(min(own, whole), self._config.pinned_tokens)
        return num_prompt_tokens - 1
