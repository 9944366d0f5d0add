"""In-place compaction: drop the lowest-scoring tokens of each KV head and close the holes.

One row with ``L`` live tokens in slots ``0 .. L-1`` (its blocks in order, gap removed) drops ``n``, a
multiple of the block size:

    [0, pinned)            never dropped, never moved
    [pinned, pinned + n)   the region F whose blocks are about to be freed
    [pinned, L - recent)   eligible: the n lowest of these are the victims
    [L - recent, L)        the recent window

Survivors inside F and victims outside F are equally many in every head; each survivor is copied into one
hole, in order. Afterwards F holds nothing of value, so the scheduler frees its blocks by the same rule
(``vllm_h2o.retention``), and every other block is full.
"""

from dataclasses import dataclass

import torch

from vllm_h2o.kernels.plain.ranks import RankRule, token_ranks
from vllm_h2o.layout import PagedLayer


@dataclass(frozen=True)
class Compaction:
    """Rows that drop tokens at the end of this step; the tensors serve all layers.

    ``R`` rows, ``M`` blocks in the longest row, ``S = M * block_size`` slots.

    Attributes:
        blocks: ``[R, M]`` int64, each row's live blocks in order, padded with block 0.
        live: ``[R, 1, S]`` bool, slots that hold a token.
        eligible: ``[R, 1, S]`` bool, slots whose token may be dropped.
        freed: ``[R, 1, S]`` bool, the region F.
        num_dropped_tokens: ``[R]`` int64.
        pinned: ``[R, 1, S]`` bool, slots of pinned tokens.
        score_pool: odd number of neighbours whose maximum a token takes as its rank.
        by_block: drop whole blocks, by the sum of their tokens' ranks.
        rule: what tokens rank by.
    """

    blocks: torch.Tensor
    live: torch.Tensor
    eligible: torch.Tensor
    freed: torch.Tensor
    num_dropped_tokens: torch.Tensor
    pinned: torch.Tensor
    score_pool: int
    by_block: bool
    rule: RankRule


def compact(layer: PagedLayer, plan: Compaction) -> torch.Tensor:
    """Move the survivors of one layer out of the region about to be freed.

    Returns:
        ``[R, H, S]`` bool: the slots whose token was dropped, before anything moved.
    """
    positions = None
    if layer.positions is not None:
        positions = layer.positions[plan.blocks].transpose(1, 2).flatten(2)
    ranks = token_ranks(layer, plan.blocks, plan.live, plan.rule, positions)
    victims = select_victims(ranks, positions, plan, layer.block_size)
    _move(layer, plan, source=plan.freed & ~victims, target=victims & ~plan.freed)
    return victims


def select_victims(
    ranks: torch.Tensor, positions: torch.Tensor | None, plan: Compaction, block_size: int
) -> torch.Tensor:
    """The ``num_dropped_tokens`` eligible tokens of each row and head that rank lowest.

    Equal ranks go in slot order, which is age order but for survivors that were moved. Pooling makes equal
    ranks common, so with it single tokens go strictly by age.

    Args:
        ranks: ``[R, H, S]`` float32, before pooling.
        positions: ``[R, H, S]`` int32 or None; needed for pooling, whose neighbours are neighbours in the
            text among the live tokens that aren't pinned (those may be shared, so they keep no scores).

    Returns:
        ``[R, H, S]`` bool.
    """
    # A model that produced NaN must not make us drop what is pinned.
    ranks = torch.nan_to_num(ranks, nan=torch.finfo(ranks.dtype).max)
    by_age = None
    if plan.score_pool > 1:
        assert positions is not None, "pooling needs positions"
        by_age = torch.argsort(positions.masked_fill(~plan.live, torch.iinfo(torch.int32).max), dim=2)
        # Pinned tokens are the oldest, recent ones the newest: masks by slot hold by age as well.
        poolable = plan.live & ~plan.pinned
        ranks = ranks.gather(2, by_age).masked_fill_(~poolable, -torch.inf)
        ranks = torch.nn.functional.max_pool1d(ranks, plan.score_pool, stride=1, padding=plan.score_pool // 2)
        if plan.by_block:
            ranks, by_age = torch.empty_like(ranks).scatter_(2, by_age, ranks), None
    if plan.by_block:
        return _lowest_blocks(ranks, plan, block_size)
    victims = _lowest(ranks, plan.eligible, plan.num_dropped_tokens)
    if by_age is not None:
        victims = torch.empty_like(victims).scatter_(2, by_age, victims)
    return victims


def _lowest(ranks: torch.Tensor, eligible: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mask of the ``count[r]`` lowest eligible entries along the last dimension; ties: first goes."""
    order = torch.argsort(ranks.masked_fill(~eligible, torch.inf), dim=2, stable=True)
    chosen = torch.arange(ranks.shape[2], device=ranks.device) < count[:, None, None]
    return torch.zeros_like(ranks, dtype=torch.bool).scatter_(2, order, chosen.expand_as(order))


def _lowest_blocks(ranks: torch.Tensor, plan: Compaction, block_size: int) -> torch.Tensor:
    # Only blocks that are eligible as a whole; what is left of a block past that is recent.
    eligible = plan.eligible.unflatten(2, (-1, block_size)).all(dim=3)
    sums = ranks.masked_fill(~plan.eligible, 0).unflatten(2, (-1, block_size)).sum(dim=3)
    # A sum that overflows would tie with the infinity that marks what isn't eligible.
    sums.clamp_(max=torch.finfo(sums.dtype).max)
    victims = _lowest(sums, eligible, plan.num_dropped_tokens // block_size)
    return victims.repeat_interleave(block_size, dim=2)


def _move(layer: PagedLayer, plan: Compaction, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy K, V, score and position of the i-th source slot to the i-th target slot of each head."""
    rows, heads, from_slots = source.nonzero(as_tuple=True)
    to_rows, _, to_slots = target.nonzero(as_tuple=True)
    if not rows.numel():
        return
    bs = layer.block_size
    from_blocks = plan.blocks[rows, from_slots // bs]
    to_blocks = plan.blocks[to_rows, to_slots // bs]
    layer.move(heads, (from_blocks, from_slots % bs), (to_blocks, to_slots % bs))
