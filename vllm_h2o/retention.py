"""The one rule: how many blocks of a request are gone once ``c`` of its tokens are computed.

The scheduler and every worker evaluate this alone and always agree, so nothing is sent between them.
It imports neither torch nor vLLM; NumPy arrays work in place of ints, one entry per request.

With block size ``bs``, budget ``B`` (a multiple of ``bs``) and pinned blocks ``s``, a step that starts
with ``c`` computed tokens and adds ``q``:

    start  blocks [s, s + evicted_blocks(c)) of the request's table are gone
    end    blocks [s, s + evicted_blocks(c + q)) are gone; the step compacts the difference away

    live tokens during the step   <= B - 1 + q
    live tokens after the step    in [B - bs, B) once the request has reached B

While a prompt is being read, a larger budget may count (``budget_at``). It only falls, when the prompt is
complete, so blocks that are gone stay gone.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

IntOrArray = TypeVar("IntOrArray", int, npt.NDArray[np.int64])


def evicted_blocks(
    num_computed_tokens: IntOrArray, *, budget_tokens: IntOrArray | int, block_size: int
) -> IntOrArray:
    """Number of blocks that a request with ``num_computed_tokens`` has lost.

    In decode the count grows exactly on the step that fills the tail block, because the budget is a
    multiple of the block size.
    """
    past_budget = num_computed_tokens - budget_tokens
    # Floor division makes every count below the budget come out at zero or less.
    blocks = past_budget // block_size + 1
    if isinstance(blocks, np.ndarray):
        return np.maximum(blocks, 0)
    return max(blocks, 0)


def budget_at(
    num_computed_tokens: IntOrArray,
    *,
    budget_tokens: IntOrArray | int,
    prompt_budget_tokens: IntOrArray | int,
    num_prompt_tokens: IntOrArray | int,
) -> IntOrArray:
    """The budget that counts for a request with ``num_computed_tokens``: the prompt's until it is read."""
    reading = num_computed_tokens < num_prompt_tokens
    if isinstance(reading, np.ndarray):
        return np.where(reading, prompt_budget_tokens, budget_tokens)
    return prompt_budget_tokens if reading else budget_tokens


def live_tokens(num_computed_tokens: IntOrArray, *, budget_tokens: int, block_size: int) -> IntOrArray:
    """Tokens whose KV a request still holds after a step that ends at ``num_computed_tokens``."""
    evicted = evicted_blocks(num_computed_tokens, budget_tokens=budget_tokens, block_size=block_size)
    return num_computed_tokens - evicted * block_size


def max_blocks_held(
    *, budget_tokens: int, block_size: int, max_in_flight_tokens: int, max_model_len: int
) -> int:
    """Upper bound on the blocks one request holds at any time.

    ``max_in_flight_tokens`` is what vLLM may have scheduled and not yet settled for one request (one
    chunk per concurrent step): blocks are freed only once their step is settled. The extra block is for
    a chunk that begins inside a block.
    """
    tokens = min(budget_tokens + max_in_flight_tokens, max_model_len)
    return -(-tokens // block_size) + 1
