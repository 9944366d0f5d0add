"""An independent statement of H2O eviction, to judge the engine by.

Written from the H2O paper (arXiv 2306.14048) and from the rule for how many tokens go; it shares
no code with `vllm_h2o` or vLLM. A Hugging Face causal LM runs with its attention function replaced
by a plain one that keeps, per layer and KV head, a list of (position, K, V, score), attends to
live tokens only, and evicts after the same steps as the engine.

Precision: the forward is float32, as in the engine's reference runs. Scores are summed in float64,
so a difference from the engine is the engine's rounding and never also the oracle's.

Shapes: H = KV heads, G = query heads per KV head, n = new tokens, L = live tokens, D = head size.
Live tokens are always in position order, which is age order. Higher score = keep.

Other policies are stated beside it, by what a token ranks by and which queries count. Where only a
flush's last queries count, it matters what a flush is: the tokens of a step of several (a chunk of a
prompt), or the single steps since then up to the end of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

# The engine's kept positions: per eviction event, layer index -> int tensor [H, live], any order.
Follow = Sequence[Mapping[int, torch.Tensor]]

_QUERY_TILE = 256  # bounds the memory of the probabilities, changes nothing else


@dataclass(frozen=True)
class OracleConfig:
    """What is kept. `*_tokens` are in tokens; `pool` = 1 and `half_life_tokens` = None are off."""

    block_size: int
    budget_tokens: int | None  # None: never evict
    pinned_blocks: int = 1
    recent_tokens: int = 0
    granularity: str = "token"  # or "block"
    half_life_tokens: float | None = None
    pool: int = 1
    window_tokens: int | None = None  # only a flush's last queries count (SnapKV, TOVA)
    rank: str = "sum"  # or "mean", "value", "keys", "random", "age"
    prompt_budget_tokens: int = (
        0  # counts instead of the budget while fewer than num_prompt_tokens are computed
    )
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        bs, budget = self.block_size, self.budget_tokens
        if bs < 1 or self.pinned_blocks < 0 or self.recent_tokens < 0:
            raise ValueError(f"size out of range in {self}")
        # An event leaves as few as budget - bs tokens: the protected ones must be among them.
        needed = self.pinned_blocks * bs + self.recent_tokens + bs
        if budget is not None and (budget % bs or budget < needed):
            raise ValueError(f"budget {budget}: need a multiple of {bs}, at least {needed}")
        if self.granularity not in ("token", "block") or self.pool < 1 or self.pool % 2 == 0:
            raise ValueError(f"unknown granularity, or pool not a positive odd number, in {self}")
        if self.half_life_tokens is not None and not self.half_life_tokens > 0:
            raise ValueError(f"half_life_tokens {self.half_life_tokens} is not positive")

        if self.rank not in ("sum", "mean", "value", "keys", "random", "age"):
            raise ValueError(f"unknown rank in {self}")

    def evicted_blocks(self, computed_tokens: int) -> int:
        """Blocks a request has lost, in total, once `computed_tokens` tokens are computed."""
        budget = self.budget_tokens
        if computed_tokens < self.num_prompt_tokens:
            budget = self.prompt_budget_tokens
        if budget is None or computed_tokens < budget:
            return 0
        return (computed_tokens - budget) // self.block_size + 1


class OracleMismatch(AssertionError):
    """The engine kept tokens that the algorithm does not keep, or an impossible set of tokens."""

    def __init__(self, event: int, layer: int, head: int | None, reason: str, **detail: object):
        self.event, self.layer, self.head = event, layer, head
        self.reason, self.detail = reason, detail
        facts = "".join(f"\n  {name}: {value}" for name, value in detail.items())
        super().__init__(f"event {event}, layer {layer}, KV head {head}: {reason}{facts}")


@dataclass
class OracleResult:
    """Everything the oracle saw.

    logits: float32 [T, vocab]; logits[t] predicts token t + 1.
    kept: per eviction event, per layer, int64 [H, live] positions, ascending, so that
        kept[event][layer][head] is one head's list; None for a layer that is never evicted.
    event_tokens: per event, the computed tokens at the end of the step that evicted.
    final_positions, final_scores: per layer int64 and float64 [H, L], what lives at the end.
    num_choices: victims chosen (tokens, or blocks at block granularity) over layers and heads.
    num_followed: of these, near-ties in which the engine's victim was taken.
    num_followed_equal: of num_followed, those whose ranks were exactly equal here: the engine
        broke a tie otherwise than older-first. Rounding explains hardly any of these.
    """

    logits: torch.Tensor
    kept: list[list[torch.Tensor | None]]
    event_tokens: list[int]
    final_positions: list[torch.Tensor]
    final_scores: list[torch.Tensor]
    num_choices: int
    num_followed: int
    num_followed_equal: int


@dataclass
class _Layer:
    """Live tokens of one layer, ascending positions in every head."""

    window: int | None  # sliding-window layers are not evicted
    positions: torch.Tensor  # int64 [H, L]
    keys: torch.Tensor  # model dtype [H, L, D], RoPE applied
    values: torch.Tensor  # model dtype [H, L, D]
    scores: torch.Tensor  # float64 [H, L]

    def extend(self, new: _Layer) -> _Layer:
        names = ("positions", "keys", "values", "scores")
        both = [torch.cat([getattr(self, name), getattr(new, name)], dim=1) for name in names]
        return _Layer(self.window, *both)

    def keep(self, mask: torch.Tensor) -> _Layer:
        """Only the tokens in mask, bool [H, L], equally many in every head."""
        tensors = (self.positions, self.keys, self.values, self.scores)
        left = [t[mask].reshape(mask.shape[0], -1, *t.shape[2:]) for t in tensors]
        return _Layer(self.window, *left)


@dataclass
class Choice:
    """The victims of one layer at one event. A unit is a token, or a block of `unit` tokens.

    positions: int64 [H, L], live tokens. eligible: the slice of L that whole units cover.
    ranks, drop: float64, bool [H, units], the eligible units in age order.
    """

    positions: torch.Tensor
    eligible: slice
    unit: int
    ranks: torch.Tensor
    drop: torch.Tensor

    @classmethod
    def make(
        cls, ranks: torch.Tensor, positions: torch.Tensor, num_tokens: int, config: OracleConfig
    ) -> Choice:
        """The algorithm's choice of `num_tokens` victims per head, by float64 ranks [H, L]."""
        assert torch.isfinite(ranks).all(), "ranks must be finite"
        bs, (heads, live) = config.block_size, ranks.shape
        unit = bs if config.granularity == "block" else 1
        first = config.pinned_blocks * bs
        units = max(0, live - config.recent_tokens - first) // unit
        eligible = slice(first, first + units * unit)
        assert num_tokens % unit == 0
        assert units * unit >= num_tokens, "too few eligible tokens"
        if config.granularity == "block":
            blocks = positions[:, eligible].reshape(heads, units, bs)
            starts = blocks[..., :1]
            whole = (starts % bs == 0) & (blocks - starts == torch.arange(bs).to(starts))
            assert whole.all(), "block granularity must leave whole, aligned blocks"

        # Neighbours are taken among the live tokens that aren't pinned (pinned ones may be shared
        # with other requests, so they have no score of this request); beyond the ends are none.
        reach = config.pool // 2
        padded = pad(ranks[:, first:], (first + reach, reach), value=-torch.inf)
        pooled = padded.unfold(-1, config.pool, 1).amax(dim=-1)  # [H, L]
        ranks = pooled[:, eligible].reshape(heads, units, unit).sum(dim=-1)
        # A stable ascending sort breaks ties by age: the older unit comes, and goes, first.
        victims = torch.argsort(ranks, dim=-1, stable=True)[:, : num_tokens // unit]
        drop = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, victims, True)
        return cls(positions, eligible, unit, ranks, drop)

    def keep_mask(self) -> torch.Tensor:
        """bool [H, L]: the live tokens outside the dropped units."""
        mask = torch.ones_like(self.positions, dtype=torch.bool)
        mask[:, self.eligible] = ~self.drop.repeat_interleave(self.unit, dim=1)
        return mask

    def settle(self, kept: torch.Tensor, rtol: float, event: int, layer: int) -> tuple[int, int]:
        """Take the engine's choice where it differs by near-ties only; raise where it is wrong.

        kept: int [H, live] positions. Returns the units followed, and those exactly tied.
        """
        heads, live = self.positions.shape
        shape = (heads, int(self.keep_mask()[0].sum()))
        if tuple(kept.shape) != shape or kept.dtype not in (torch.int32, torch.int64):
            reason = f"kept is {kept.dtype} {tuple(kept.shape)}, not integers {shape}"
            raise OracleMismatch(event, layer, None, reason)
        kept = kept.to(self.positions).sort(dim=1).values
        index = torch.searchsorted(self.positions.contiguous(), kept).clamp(max=live - 1)
        gone = torch.ones_like(self.positions, dtype=torch.bool).scatter_(1, index, False)
        by_unit = gone[:, self.eligible].reshape(heads, -1, self.unit)
        theirs, protected = by_unit.any(dim=-1), gone.clone()
        protected[:, self.eligible] = False
        for reason, bad in (
            ("a kept position is not live", self.positions.gather(1, index) != kept),
            ("a position is kept twice", kept.diff(dim=1) == 0),
            ("a protected token was dropped", protected),
            ("a block was dropped in part", theirs & ~by_unit.all(dim=-1)),
        ):
            for head in torch.nonzero(bad.any(dim=1)).flatten().tolist():
                lost, left = self.positions[head, gone[head]].tolist(), kept[head].tolist()
                raise OracleMismatch(event, layer, head, reason, kept=left, dropped=lost)

        # Every pair (dropped by them only, dropped by us only) must be a near-tie, so it is
        # enough to compare the highest of the former with the lowest of the latter.
        ours_only, theirs_only = self.drop & ~theirs, theirs & ~self.drop
        high = self.ranks.masked_fill(~theirs_only, -torch.inf).amax(dim=1)
        low = self.ranks.masked_fill(~ours_only, torch.inf).amin(dim=1)
        near = high - low <= rtol * torch.maximum(high.abs(), low.abs())
        for head in torch.nonzero(ours_only.any(dim=1) & ~near).flatten().tolist():
            start = self.positions[head, self.eligible][:: self.unit]
            pair = {"engine": theirs_only[head], "oracle": ours_only[head]}
            detail = {
                f"dropped by the {who} only (position, rank)": list(
                    zip(start[units].tolist(), self.ranks[head, units].tolist(), strict=True)
                )
                for who, units in pair.items()
            }
            raise OracleMismatch(event, layer, head, "not the lowest ranks were dropped", **detail)
        self.drop = theirs
        return int(ours_only.sum()), int(ours_only[high == low].sum())


@dataclass
class _Sequence:
    """One sequence: its live tokens in every layer, and what happened to it so far."""

    config: OracleConfig
    follow: Follow | None = None
    follow_rtol: float = 0.0
    computed_tokens: int = 0
    layers: dict[int, _Layer] = field(default_factory=dict)
    flush_ends: list[int] = field(default_factory=list)  # of this forward, in tokens; for windows only
    called: list[int] = field(default_factory=list)  # layers that attended in this forward
    logits: list[torch.Tensor] = field(default_factory=list)
    kept: list[list[torch.Tensor | None]] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # the result's three num_*

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Append n tokens to the layer, attend to what is live, add to the scores.

        query [1, H*G, n, D]; key, value [1, H, n, D]; returns [1, n, H*G, D].
        """
        (_, heads, n, dim), groups = key.shape, query.shape[1] // key.shape[1]
        position = self.computed_tokens + torch.arange(n, device=key.device)
        zeros = torch.zeros(heads, n, dtype=torch.float64, device=key.device)
        layer = _Layer(window, position.expand(heads, n), key[0], value[0], zeros)
        if layer_idx in self.layers:
            layer = self.layers[layer_idx].extend(layer)
        self.layers[layer_idx] = layer
        self.called.append(layer_idx)

        # A query that is a tokens old counts 0.5 ** (a / half_life); the newest query is 0 old.
        weights = torch.ones_like(zeros[0])
        if (half_life := self.config.half_life_tokens) is not None:
            weights = 0.5 ** ((position[-1] - position).double() / half_life)
            layer.scores = layer.scores * 0.5 ** (n / half_life)

        query = query.reshape(heads, groups, n, dim)  # HF's order: a group's heads are adjacent
        outputs = []
        for tile, new_flush in self._tiles(n, weights):
            if new_flush:
                layer.scores = torch.zeros_like(layer.scores)
            logits = torch.einsum("hgnd,hld->hgnl", query[:, :, tile], layer.keys) * scaling
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            # [H, n, L]: how many tokens the key is behind the query.
            behind = position[tile][None, :, None] - layer.positions[:, None, :]
            visible = behind >= 0
            if window is not None:
                visible &= behind < window
            probs = logits.masked_fill(~visible[:, None], -torch.inf).softmax(dim=-1)
            outputs.append(torch.einsum("hgnl,hld->hgnd", probs, layer.values))
            of_group = probs.sum(dim=1, dtype=torch.float64)  # [H, n, L]
            layer.scores = layer.scores + torch.einsum("hnl,n->hl", of_group, weights[tile])
        output = torch.cat(outputs, dim=2).reshape(heads * groups, n, -1)
        return output.transpose(0, 1)[None]

    def _tiles(self, n: int, weights: torch.Tensor) -> Iterator[tuple[slice, bool]]:
        """Cut a forward's queries into tiles; with a window also into flushes, whose older queries get
        weight 0. The second value says that what was stored is to be forgotten."""
        window, edges = self.config.window_tokens, [0, n]
        if window is not None:
            edges = sorted({0, *(end - self.computed_tokens for end in self.flush_ends), n})
        for first, stop in pairwise(edges):
            forget = False
            if window is not None:
                # Queries that no flush took yet are not scored at all.
                flushed = self.computed_tokens + stop in self.flush_ends
                weights[first : max(first, stop - window) if flushed else stop] = 0
                forget = flushed and stop - first >= window
            for start in range(first, stop, _QUERY_TILE):
                yield slice(start, min(start + _QUERY_TILE, stop)), forget and start == first

    def ranks(self, layer: _Layer, layer_idx: int) -> torch.Tensor:
        """float64 [H, L]: what the layer's live tokens rank by, before pooling."""
        config, positions = self.config, layer.positions
        if config.rank == "age":
            return positions.double()
        if config.rank == "random":
            heads = positions.shape[0]
            drawn = [
                [_drawn(p, head + layer_idx * heads) for p in positions[head].tolist()]
                for head in range(heads)
            ]
            return torch.tensor(drawn, dtype=torch.float64)
        if config.rank == "keys":
            unit = torch.nn.functional.normalize(layer.keys.double(), dim=2)
            return 1 - torch.cosine_similarity(unit, unit.mean(dim=1, keepdim=True), dim=2)
        if config.rank == "value":
            return layer.scores * layer.values.double().abs().sum(dim=2)
        if config.rank == "mean":
            ages = torch.arange(self.computed_tokens, dtype=torch.float64)
            half_life = config.half_life_tokens
            weights = torch.ones_like(ages) if half_life is None else 0.5 ** (ages / half_life)
            return layer.scores / weights.cumsum(0)[self.computed_tokens - 1 - positions]
        return layer.scores

    def evict(self, num_tokens: int) -> None:
        """Drop `num_tokens` tokens from every KV head of every evicted layer."""
        event = len(self.kept)
        evicted = [idx for idx in sorted(self.layers) if self.layers[idx].window is None]
        if self.follow is not None and event >= len(self.follow):
            raise ValueError(f"follow has {len(self.follow)} events; the oracle has more")
        if self.follow is not None and sorted(self.follow[event]) != evicted:
            raise ValueError(f"event {event}: follow must have exactly the layers {evicted}")
        self.kept.append([None] * len(self.layers))
        self.event_tokens.append(self.computed_tokens)
        for idx in evicted:
            layer = self.layers[idx]
            choice = Choice.make(self.ranks(layer, idx), layer.positions, num_tokens, self.config)
            followed = (0, 0)
            if self.follow is not None:
                followed = choice.settle(self.follow[event][idx], self.follow_rtol, event, idx)
            for i, count in enumerate((int(choice.drop.sum()), *followed)):
                self.counts[i] += count
            self.layers[idx] = layer.keep(choice.keep_mask())
            self.kept[event][idx] = self.layers[idx].positions.clone()

    def result(self) -> OracleResult:
        layers = [self.layers[idx] for idx in sorted(self.layers)]
        positions, scores = [x.positions for x in layers], [x.scores for x in layers]
        logits = torch.cat(self.logits)
        return OracleResult(logits, self.kept, self.event_tokens, positions, scores, *self.counts)


def _drawn(position: int, stream: int) -> float:
    """A number in [0, 1) from a 32-bit hash."""
    x = (position * 0x9E3779B1 + stream * 0x85EBCA77) % 2**32
    for factor in (0x7FEB352D, 0x846CA68B):
        x = ((x ^ (x >> 16)) * factor) % 2**32
    return ((x ^ (x >> 16)) >> 8) / 2**24


_current: _Sequence | None = None  # the sequence whose forward is running


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Hugging Face's attention interface. Its mask is ignored: positions say what is visible."""
    assert _current is not None
    assert query.shape[0] == 1
    assert not kwargs.get("dropout")
    assert kwargs.get("s_aux") is None, "attention sinks are not part of this oracle"
    window = kwargs.get("sliding_window")
    if (kinds := getattr(module.config, "layer_types", None)) is not None:
        # Other kinds (chunked, linear) need other masks: refuse rather than attend wrongly.
        sliding = {"full_attention": False, "sliding_attention": True}[kinds[module.layer_idx]]
        assert sliding == (window is not None), "layer type and sliding_window disagree"
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap = kwargs.get("softcap")
    return _current.attend(module.layer_idx, query, key, value, scaling, window, softcap), None


def schedule(prompt_tokens: int, chunk_tokens: int, new_tokens: int) -> list[int]:
    """Step sizes of one request alone: prefill chunks, then ones. The last token is never fed."""
    full, rest = divmod(prompt_tokens, chunk_tokens)
    return [chunk_tokens] * full + [rest] * (rest > 0) + [1] * (new_tokens - 1)


class Oracle:
    """Runs one Hugging Face causal LM under the algorithm. Not thread-safe."""

    def __init__(self, model: str | PathLike[str] | PreTrainedModel) -> None:
        """A model directory is loaded in float32; a model is used as it is (float32 or float64)."""
        if not isinstance(model, PreTrainedModel):
            model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        if model.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the oracle needs a float32 or float64 model, not {model.dtype}")
        self.model = model.eval()

    def run(
        self,
        token_ids: list[int],
        step_sizes: list[int],
        config: OracleConfig,
        follow: Follow | None = None,
        *,
        follow_rtol: float = 1e-5,
        merge_steps: bool = True,
    ) -> OracleResult:
        """Feed token_ids in steps of step_sizes tokens (the engine's steps; they sum to T).

        follow: the engine's kept positions, one entry per eviction event. Near-ties (ranks within
        follow_rtol, relative) take the engine's choice; anything else raises OracleMismatch.
        merge_steps: run steps between evictions as one forward, which is the same but faster.
        """
        if sum(step_sizes) != len(token_ids) or min(step_sizes, default=0) < 1:
            raise ValueError(f"steps {step_sizes} do not add up to {len(token_ids)} tokens")
        if config.window_tokens is not None and not merge_steps:
            raise ValueError("with a window, steps must be merged")
        seq, end = _Sequence(config, follow, follow_rtol), 0
        for size in step_sizes:
            end += size
            evicts = config.evicted_blocks(end) > config.evicted_blocks(end - size)
            if size > 1 or (evicts and end % config.block_size):
                seq.flush_ends += [end - size, end]
            elif end % config.block_size == 0:
                seq.flush_ends.append(end)
            if evicts or not merge_steps or end == len(token_ids):
                self._step(seq, token_ids[seq.computed_tokens : end])
        if follow is not None and len(follow) != len(seq.kept):
            raise ValueError(f"follow has {len(follow)} events, the oracle {len(seq.kept)}")
        return seq.result()

    def generate(
        self, prompt_ids: list[int], chunk_tokens: int, max_new_tokens: int, config: OracleConfig
    ) -> tuple[list[int], OracleResult]:
        """Greedy decoding: prefill in chunks, then one token a step. Returns the new tokens.

        The result covers the tokens fed, that is all but the last new one.
        """
        if config.window_tokens is not None:
            raise ValueError("with a window, use run()")
        seq, tokens = _Sequence(config), list(prompt_ids)
        for size in schedule(len(prompt_ids), chunk_tokens, max_new_tokens):
            self._step(seq, tokens[seq.computed_tokens : seq.computed_tokens + size])
            if seq.computed_tokens == len(tokens):
                tokens.append(int(seq.logits[-1][-1].argmax()))
        return tokens[len(prompt_ids) :], seq.result()

    @torch.no_grad()
    def _step(self, seq: _Sequence, token_ids: list[int]) -> None:
        """One forward, and the eviction after it."""
        start, end = seq.computed_tokens, seq.computed_tokens + len(token_ids)
        ids = torch.tensor([token_ids], device=self.model.device)
        positions = torch.arange(start, end, device=self.model.device)[None]
        seq.called.clear()
        with self._attention_of(seq):
            output = self.model(ids, position_ids=positions, use_cache=False)
        num_layers = self.model.config.get_text_config().num_hidden_layers
        # Guards against a model that bypasses the attention interface or shares layers.
        assert sorted(seq.called) == list(range(num_layers))
        seq.logits.append(output.logits[0].float())
        seq.computed_tokens = end
        seq.flush_ends.clear()
        blocks = seq.config.evicted_blocks(end) - seq.config.evicted_blocks(start)
        if blocks:
            seq.evict(blocks * seq.config.block_size)

    @contextmanager
    def _attention_of(self, seq: _Sequence) -> Iterator[None]:
        """Route the model's attention to seq, and leave the model as it was afterwards."""
        global _current
        before = self.model.config._attn_implementation
        # Here, not on import: should this file be imported under two names, each uses its own.
        AttentionInterface.register("h2o_oracle", _attention)
        self.model.set_attn_implementation("h2o_oracle")
        _current = seq
        try:
            yield
        finally:
            _current = None
            self.model.set_attn_implementation(before)
