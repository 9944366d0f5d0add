"""Plain float64 statement of what `vllm_h2o` computes in batched tensors, to judge it by.

One KV head of one request at a time, loop by loop, on Python numbers. It shares no code with
`vllm_h2o`: where the two differ, one of them is wrong.

A row's live tokens are numbered by slot, `0 .. L - 1`: its blocks in order without the evicted ones.
Higher score = keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

Vector = Sequence[float]
Token = TypeVar("Token")


def probabilities(
    query: Vector, keys: Sequence[Vector], *, scale: float, softcap: float = 0.0, sink: float | None = None
) -> list[float]:
    """Attention of one query head to the keys that it sees; less than 1 in total where it has a sink."""
    logits = []
    for key in keys:
        logit = scale * sum(q * k for q, k in zip(query, key, strict=True))
        logits.append(softcap * math.tanh(logit / softcap) if softcap else logit)
    highest = max(logits if sink is None else [*logits, sink])
    total = sum(math.exp(logit - highest) for logit in logits)
    if sink is not None:
        total += math.exp(sink - highest)
    return [math.exp(logit - highest) / total for logit in logits]


def scores_after(
    stored: Vector,
    keys: Sequence[Vector],
    queries: Sequence[Sequence[Vector]],
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: Vector | None = None,
    half_life: float | None = None,
) -> list[float]:
    """Scores of one KV head once the newest `n` queries have looked at its `L` live tokens.

    A chunk of a prompt and the kept queries of a tail block are the same to it: nothing was evicted
    among these queries, so each sees all that was live when its own token was the newest.

    Args:
        stored: `[L]`, scores so far; 0 for new tokens.
        keys: `[L][head_size]`.
        queries: `[n][group][head_size]`, oldest first; the last one's own token is `L - 1`.
        sinks: `[group]`, the sink logit of each query head.
        half_life: age in tokens at which a query counts half; None = all count the same.
    """
    num_live, num_queries = len(keys), len(queries)

    def weight(age: int) -> float:
        return 1.0 if half_life is None else 0.5 ** (age / half_life)

    scores = [score * weight(num_queries) for score in stored]
    for i, group in enumerate(queries):
        age = num_queries - 1 - i
        visible = keys[: num_live - age]
        for g, query in enumerate(group):
            sink = None if sinks is None else sinks[g]
            received = probabilities(query, visible, scale=scale, softcap=softcap, sink=sink)
            for slot, probability in enumerate(received):
                scores[slot] += weight(age) * probability
    return scores


def windowed_scores_after(
    stored: Vector, keys: Sequence[Vector], queries: Sequence[Sequence[Vector]], *, window: int, scale: float
) -> list[float]:
    """As ``scores_after``, where only a flush's last ``window`` queries count.

    As many or more replace what was stored; fewer are added to it.
    """
    kept = stored if len(queries) < window else [0.0] * len(stored)
    return scores_after(kept, keys, queries[-window:], scale=scale)


def mean_ranks(
    scores: Vector, positions: Sequence[int], num_tokens: int, half_life: float | None = None
) -> list[float]:
    """Each token's score over what it would be if every query since had given it a probability of 1."""

    def weight(age: int) -> float:
        return 1.0 if half_life is None else 0.5 ** (age / half_life)

    return [
        score / sum(weight(age) for age in range(num_tokens - position))
        for score, position in zip(scores, positions, strict=True)
    ]


def value_ranks(scores: Vector, values: Sequence[Vector]) -> list[float]:
    """Each token's score times the L1 norm of its value."""
    return [score * sum(abs(v) for v in value) for score, value in zip(scores, values, strict=True)]


def key_ranks(keys: Sequence[Vector]) -> list[float]:
    """1 - cos(key, mean of the normalised keys) of each token."""

    def unit(vector: Vector) -> list[float]:
        norm = math.sqrt(sum(x * x for x in vector))
        return [x / norm for x in vector] if norm else [0.0] * len(vector)

    directions = [unit(key) for key in keys]
    anchor = unit([sum(parts) for parts in zip(*directions, strict=True)])
    return [1 - sum(a * b for a, b in zip(direction, anchor, strict=True)) for direction in directions]


def drawn_rank(position: int, layer: int, head: int, num_heads: int) -> float:
    """The number in [0, 1) that a token draws: a 32-bit hash with two rounds of multiplication."""
    x = (position * 0x9E3779B1 + (head + layer * num_heads) * 0x85EBCA77) % 2**32
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 16)) * factor) % 2**32
    return ((x ^ (x >> 16)) >> 8) / 2**24


def pooled(scores: Vector, positions: Sequence[int], pinned_tokens: int, pool: int) -> list[float]:
    """Each token's maximum over its neighbours in the text, among live tokens that aren't pinned."""
    ranks = list(scores)
    by_age = sorted(range(pinned_tokens, len(scores)), key=lambda slot: positions[slot])
    for i, slot in enumerate(by_age):
        for neighbour in by_age[max(0, i - pool // 2) : i + pool // 2 + 1]:
            ranks[slot] = max(ranks[slot], scores[neighbour])
    return ranks


def victims(
    scores: Vector,
    positions: Sequence[int] | None,
    count: int,
    *,
    pinned_tokens: int,
    recent_tokens: int,
    pool: int = 1,
    block_size: int | None = None,
) -> set[int]:
    """Slots of the `count` tokens that one KV head drops.

    Ties go in slot order; by single tokens with a pool, older positions go first.

    Args:
        scores: `[L]`; NaN counts as highest, so that it is kept.
        block_size: given to drop whole blocks, by the sum of their tokens' ranks.
    """
    num_live = len(scores)
    ranks: Vector = [math.inf if math.isnan(score) else score for score in scores]
    if pool > 1:
        assert positions is not None
        ranks = pooled(ranks, positions, pinned_tokens, pool)
    eligible = range(pinned_tokens, num_live - recent_tokens)
    if block_size is not None:
        starts = [
            start
            for start in range(pinned_tokens, num_live, block_size)
            if start + block_size <= num_live - recent_tokens
        ]
        starts.sort(key=lambda start: (sum(ranks[start : start + block_size]), start))
        chosen = starts[: count // block_size]
        return {start + offset for start in chosen for offset in range(block_size)}
    by_age = positions if pool > 1 and positions is not None else range(num_live)
    order = sorted(eligible, key=lambda slot: (ranks[slot], by_age[slot]))
    return set(order[:count])


def compacted(
    tokens: Sequence[Token], dropped: set[int], *, pinned_tokens: int, num_freed: int
) -> list[Token | None]:
    """One KV head's slots after compaction; None in the freed region, which nobody reads again.

    Survivors of the freed region go to the holes outside it, both in slot order.
    """
    freed = range(pinned_tokens, pinned_tokens + num_freed)
    survivors = [slot for slot in freed if slot not in dropped]
    holes = sorted(slot for slot in dropped if slot not in freed)
    after: list[Token | None] = [None if slot in freed else token for slot, token in enumerate(tokens)]
    for survivor, hole in zip(survivors, holes, strict=True):
        after[hole] = tokens[survivor]
    return after
