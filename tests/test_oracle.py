"""The oracle is itself checked: against Hugging Face, against a loop-by-loop rewrite, by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.oracle import Choice, Oracle, OracleConfig, OracleMismatch, OracleResult, schedule

VOCAB = 97
DEFAULT_MODEL = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"
MODEL = Path(os.environ.get("VLLM_H2O_MODEL") or DEFAULT_MODEL)

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
MHA = COMMON | {"initializer_range": 0.15, "intermediate_size": 96}
GQA = MHA | {"num_key_value_heads": 2}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GQA)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GQA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GQA, head_dim=24)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**MHA, rope_parameters=PARTIAL_ROPE),
    ),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**COMMON, ffn_dim=96, word_embed_proj_dim=64, init_std=0.15),
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **GQA | {"num_hidden_layers": 3},
            head_dim=24,
            sliding_window=9,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads only get in each other's way on matrices this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    built = {}
    for name, build in FAMILIES.items():
        torch.manual_seed(0)
        model = built[name] = build().eval()
        for key, parameter in model.named_parameters():
            # Biases start at zero and norms constant: make them matter.
            if key.endswith("bias") or "norm" in key:
                parameter.data += 0.3 * torch.randn_like(parameter)
    return built


def tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (count,), generator=generator).tolist()


def as_follow(result: OracleResult) -> list[dict[int, torch.Tensor]]:
    return [{i: t for i, t in enumerate(event) if t is not None} for event in result.kept]


def same_kept(a: OracleResult, b: OracleResult) -> bool:
    """The same kept positions in every event, layer and head."""
    if [len(event) for event in a.kept] != [len(event) for event in b.kept]:
        return False
    pairs = zip(chain(*a.kept), chain(*b.kept), strict=True)
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


# --- the forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_eviction_logits_are_those_of_hugging_face(models, family, attention):
    model, ids = models[family], tokens(40)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
    got = Oracle(model).run(ids, [17, 9, *[1] * 14], OracleConfig(4, None), merge_steps=False)
    assert want.std() > 0.1  # a model that says nothing would agree with anything
    torch.testing.assert_close(got.logits, want, atol=1e-4, rtol=1e-4)
    assert got.kept == []
    assert got.num_choices == 0
    assert model.config._attn_implementation == attention


def test_logit_softcapping_is_that_of_hugging_face():
    options = GQA | {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 9}
    logits, ids = [], tokens(40)
    for cap in (1.0, 50.0):
        torch.manual_seed(0)
        config = Gemma2Config(**options, attn_logit_softcapping=cap)
        model = Gemma2ForCausalLM(config).eval()
        model.set_attn_implementation("eager")
        with torch.no_grad():
            logits.append(model(torch.tensor([ids]), use_cache=False).logits[0])
        got = Oracle(model).run(ids, [30, 10], OracleConfig(4, None)).logits
        torch.testing.assert_close(got, logits[-1], atol=1e-4, rtol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def test_gemma_is_sensitive_to_its_window(models):
    """Else the comparison above would not tell a wrong window from the right one."""
    ids, logits = tokens(40), []
    for window in (8, 9):
        for layer in models["gemma3"].model.layers:
            if layer.self_attn.is_sliding:
                layer.self_attn.sliding_window = window
        result = Oracle(models["gemma3"]).run(ids, [40], OracleConfig(4, None))
        logits.append(result.logits)
    assert (logits[0] - logits[1])[9:].abs().max() > 1e-2
    assert torch.equal(logits[0][:8], logits[1][:8])


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_steps_equal_single_steps(models, family):
    config = OracleConfig(4, 20, recent_tokens=6, half_life_tokens=12.0)
    ids, steps = tokens(60), [5, 22, *[1] * 33]
    oracle = Oracle(models[family])
    merged = oracle.run(ids, steps, config)
    single = oracle.run(ids, steps, config, merge_steps=False)
    assert len(merged.kept) == 10
    assert same_kept(merged, single)
    torch.testing.assert_close(merged.logits, single.logits, atol=1e-5, rtol=1e-5)
    for a, b in zip(merged.final_scores, single.final_scores, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_query_tiles_change_nothing(models, monkeypatch):
    config = OracleConfig(4, 20, recent_tokens=6, half_life_tokens=12.0)
    whole = Oracle(models["gemma3"]).run(tokens(50), [31, 19], config)
    monkeypatch.setattr("tests.oracle._QUERY_TILE", 7)
    tiled = Oracle(models["gemma3"]).run(tokens(50), [31, 19], config)
    assert same_kept(whole, tiled)
    torch.testing.assert_close(whole.logits, tiled.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.final_scores, tiled.final_scores, atol=1e-5, rtol=1e-5)


def test_sliding_layers_are_not_evicted(models):
    result = Oracle(models["gemma3"]).run(tokens(50), [30, *[1] * 20], OracleConfig(4, 16))
    assert all(event[0] is None and event[2] is None for event in result.kept)
    assert all(event[1] is not None for event in result.kept)
    assert [p.shape[1] for p in result.final_positions] == [50, 14, 50]


def test_eviction_changes_only_what_comes_after_it(models):
    ids, steps = tokens(60), [20, *[1] * 40]
    oracle = Oracle(models["llama"])
    full = oracle.run(ids, steps, OracleConfig(4, None)).logits
    cut = oracle.run(ids, steps, OracleConfig(4, 28)).logits
    torch.testing.assert_close(cut[:28], full[:28], atol=1e-5, rtol=1e-5)
    assert (cut[28:] - full[28:]).abs().amax(dim=1).min() > 1e-3


def test_generate_is_the_run_of_its_own_tokens(models):
    oracle, config = Oracle(models["llama"]), OracleConfig(4, 16, recent_tokens=4)
    prompt = tokens(23)
    new, result = oracle.generate(prompt, 10, 15, config)
    steps = schedule(23, 10, 15)
    assert steps == [10, 10, 3, *[1] * 14]
    assert len(new) == 15
    again = oracle.run(prompt + new[:-1], steps, config)
    assert again.logits[22:].argmax(dim=-1).tolist() == new
    assert same_kept(result, again)
    assert result.event_tokens == again.event_tokens
    assert schedule(20, 10, 1) == [10, 10]


# --- the algorithm, once more, one token at a time -----------------------------------------------


@dataclass
class Entry:
    """One live token of one KV head. seen: (query position, probability over the group)."""

    position: int
    key: torch.Tensor
    value: torch.Tensor
    seen: list[tuple[int, float]]


def rotate(x: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    half = x.shape[-1] // 2
    angle = position * theta ** -(torch.arange(half, dtype=torch.float32) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def brute_force(model, ids, steps, config):
    """Llama by hand. Returns logits [T, vocab] and kept[event][layer][head] as lists."""
    bs = config.block_size
    decoder, heads = model.model, model.config.num_key_value_heads
    groups = model.config.num_attention_heads // heads
    store = [[[] for _ in range(heads)] for _ in decoder.layers]
    ends, logits, kept = [sum(steps[: i + 1]) for i in range(len(steps))], [], []
    lost = 0
    for now, token in enumerate(ids):
        x = decoder.embed_tokens.weight[token]
        for layer, lists in zip(decoder.layers, store, strict=True):
            attention, y = layer.self_attn, layer.input_layernorm(x)
            query = rotate(attention.q_proj(y).view(heads, groups, -1), now)
            key = rotate(attention.k_proj(y).view(heads, -1), now)
            value = attention.v_proj(y).view(heads, -1)
            outputs = []
            for head in range(heads):
                live = lists[head]
                live.append(Entry(now, key[head], value[head], []))
                total = [0.0] * len(live)
                for group in range(groups):
                    dots = [float(query[head, group] @ e.key) for e in live]
                    top = max(dots)
                    exps = [2.718281828459045 ** ((d - top) / len(key[0]) ** 0.5) for d in dots]
                    probs = [e / sum(exps) for e in exps]
                    outputs.append(sum(p * e.value for p, e in zip(probs, live, strict=True)))
                    total = [t + p for t, p in zip(total, probs, strict=True)]
                for entry, probability in zip(live, total, strict=True):
                    entry.seen.append((now, probability))
            x = x + attention.o_proj(torch.cat(outputs))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        logits.append(model.lm_head(decoder.norm(x)))

        if now + 1 not in ends or config.budget_tokens is None:
            continue
        target = 0  # blocks to have lost: shrink by whole blocks until live < budget
        while now + 1 - target * bs >= config.budget_tokens:
            target += 1
        if target > lost:
            kept.append([])
            for lists in store:
                for head in range(heads):
                    lists[head] = survivors(lists[head], (target - lost) * bs, now, config)
                kept[-1].append([[e.position for e in live] for live in lists])
            lost = target
    return torch.stack(logits), kept


def survivors(live: list[Entry], count: int, now: int, config: OracleConfig) -> list[Entry]:
    half_life, bs = config.half_life_tokens, config.block_size
    scores = []
    for entry in live:
        score = 0.0
        for position, probability in entry.seen:
            age = now - position
            score += probability if half_life is None else probability * 0.5 ** (age / half_life)
        scores.append(score)
    reach = (config.pool - 1) // 2
    ranks = []
    for i in range(len(live)):
        pinned = config.pinned_blocks * bs
        window = [j for j in range(i - reach, i + reach + 1) if pinned <= j < len(live)]
        ranks.append(max((scores[j] for j in window), default=0.0))
    allowed = []
    for i, entry in enumerate(live):
        if entry.position >= config.pinned_blocks * bs and i < len(live) - config.recent_tokens:
            allowed.append(i)
    if config.granularity == "token":
        units = [(ranks[i], live[i].position, [i]) for i in allowed]
    else:
        units = []
        for block in sorted({entry.position // bs for entry in live}):
            members = [i for i, entry in enumerate(live) if entry.position // bs == block]
            if len(members) == bs and all(i in allowed for i in members):
                units.append((sum(ranks[i] for i in members), block, members))
    gone: set[int] = set()
    for _, _, members in sorted(units):
        if len(gone) < count:
            gone.update(members)
    assert len(gone) == count
    return [entry for i, entry in enumerate(live) if i not in gone]


ONES = [1] * 22
BASE = OracleConfig(4, 16, pinned_blocks=1, recent_tokens=4)
CASES = {
    "token": (BASE, [30, *ONES]),
    "block": (replace(BASE, granularity="block"), [30, *ONES]),
    "half_life": (replace(BASE, half_life_tokens=5.0), [30, *ONES]),
    "half_life_block": (replace(BASE, half_life_tokens=0.7, granularity="block"), [30, *ONES]),
    "pool": (replace(BASE, budget_tokens=20, pool=3), [30, *ONES]),
    "pool_wide": (replace(BASE, budget_tokens=24, pool=9), [30, *ONES]),
    "pool_block": (replace(BASE, pool=5, granularity="block"), [30, *ONES]),
    "all": (replace(BASE, pool=5, half_life_tokens=6.5, recent_tokens=3), [9, 20, *ONES]),
    "chunks": (BASE, [7, 13, 1, 9, *ONES]),
    "chunks_block": (replace(BASE, granularity="block", pool=3), [7, 13, 1, 9, *ONES]),
    "recent_odd": (replace(BASE, budget_tokens=20, recent_tokens=7), [19, *ONES]),
    "recent_odd_block": (
        replace(BASE, budget_tokens=24, recent_tokens=7, granularity="block"),
        [25, 6, *ONES],
    ),
    "nothing_protected": (OracleConfig(4, 12, pinned_blocks=0), [18, *ONES]),
    "two_pinned": (replace(BASE, pinned_blocks=2, recent_tokens=2), [18, *ONES]),
    "one_token_blocks": (OracleConfig(1, 8, pinned_blocks=2, recent_tokens=3), [12, *ONES]),
    "prompt_budget_less_one": (BASE, [15, *ONES]),
    "prompt_is_budget": (BASE, [16, *ONES]),
    "prompt_budget_plus_one": (BASE, [17, *ONES]),
    "least_budget": (replace(BASE, budget_tokens=12), [17, *ONES]),
    "budget_never_reached": (replace(BASE, budget_tokens=64), [17, *ONES]),
    "no_budget": (replace(BASE, budget_tokens=None), [17, *ONES]),
}


def check_against_brute_force(model, ids, steps, config) -> int:
    result = Oracle(model).run(ids, steps, config)
    with torch.no_grad():
        logits, kept = brute_force(model, ids, steps, config)
    assert [[layer.tolist() for layer in event] for event in result.kept] == kept
    torch.testing.assert_close(result.logits, logits, atol=2e-4, rtol=2e-4)
    return len(kept)


@pytest.mark.parametrize("case", CASES)
def test_same_as_brute_force(models, case):
    config, steps = CASES[case]
    events = check_against_brute_force(models["llama"], tokens(sum(steps), 2), steps, config)
    assert (events >= 4) == (case not in ("budget_never_reached", "no_budget"))


@settings(max_examples=60, derandomize=True, database=None)
@given(data=st.data())
def test_same_as_brute_force_for_any_schedule(models, data):
    bs = data.draw(st.sampled_from([1, 2, 4, 5]))
    pinned, recent = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 9))
    least = -(-(pinned * bs + recent + bs) // bs)
    config = OracleConfig(
        bs,
        bs * data.draw(st.integers(least, least + 2)),
        pinned,
        recent,
        granularity=data.draw(st.sampled_from(["token", "block"])),
        half_life_tokens=data.draw(st.sampled_from([None, 0.5, 3.0, 40.0])),
        pool=data.draw(st.sampled_from([1, 3, 7])),
    )
    steps = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=4)) + [1] * 8
    check_against_brute_force(models["llama"], tokens(sum(steps), 3), steps, config)


# --- invariants ----------------------------------------------------------------------------------


@settings(max_examples=60, derandomize=True, database=None)
@given(
    steps=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    budget_blocks=st.integers(3, 8),
    block=st.booleans(),
)
def test_live_tokens_are_bounded_and_protected(models, steps, budget_blocks, block):
    bs, recent = 4, 3
    budget = bs * budget_blocks
    config = OracleConfig(bs, budget, 1, recent, granularity="block" if block else "token")
    result = Oracle(models["llama"]).run(tokens(sum(steps)), steps, config)
    assert len(result.kept) == len(result.event_tokens)
    assert result.final_positions[0].shape[1] < budget
    for end, event in zip(result.event_tokens, result.kept, strict=True):
        for layer in event:
            live = layer.shape[1]
            assert budget - bs <= live < budget
            assert (end - live) % bs == 0
            for head in layer.tolist():
                assert head == sorted(set(head))
                assert head[:bs] == list(range(bs))
                assert head[-recent:] == list(range(end - recent, end))
    victims = result.event_tokens[-1] - event[0].shape[1] if result.kept else 0
    assert result.num_choices == 2 * 2 * victims // (bs if block else 1)


def test_every_query_gives_one_per_head_and_half_life_halves_it(models):
    oracle, ids = Oracle(models["llama"]), tokens(30)
    plain = oracle.run(ids, [11, 19], OracleConfig(4, None))
    for scores in plain.final_scores:  # 30 queries of 2 heads
        torch.testing.assert_close(scores.sum(dim=1), torch.full((2,), 60.0).double())
    halved = oracle.run(ids, [11, 19], OracleConfig(4, None, half_life_tokens=1.0))
    want = 2 * sum(0.5**age for age in range(30))
    for scores in halved.final_scores:
        torch.testing.assert_close(scores.sum(dim=1), torch.full((2,), want).double())
    endless = oracle.run(ids, [11, 19], OracleConfig(4, None, half_life_tokens=1e12))
    torch.testing.assert_close(endless.final_scores, plain.final_scores)


def test_heads_and_layers_choose_for_themselves(models):
    last = Oracle(models["llama"]).run(tokens(60), [40, *[1] * 20], BASE).kept[-1]
    heads = [tuple(head.tolist()) for layer in last for head in layer]
    assert len(set(heads)) == 4


# --- choices made by hand ------------------------------------------------------------------------


def choice(scores: list[float], count: int, config: OracleConfig) -> Choice:
    row = torch.tensor([scores], dtype=torch.float64)
    return Choice.make(row, torch.arange(len(scores))[None], count, config)


def dropped(made: Choice) -> list[int]:
    return made.positions[~made.keep_mask()].tolist()


FREE = OracleConfig(2, None, pinned_blocks=0)


def test_ties_go_to_the_older():
    assert dropped(choice([1, 1, 1, 1, 0, 1], 4, FREE)) == [0, 1, 2, 4]
    blocks = replace(FREE, granularity="block")
    assert dropped(choice([1, 1, 0, 2, 2, 0], 4, blocks)) == [0, 1, 2, 3]


def test_pool_sees_recent_but_not_pinned_neighbours_and_stops_at_the_ends():
    config = replace(FREE, pinned_blocks=1, recent_tokens=2, pool=3)
    # Ranks of 2..5: 2 whatever the pinned 9 beside it, then 3, 3, and 8 from the recent one.
    assert dropped(choice([0, 9, 2, 0, 3, 1, 8, 0], 2, config)) == [2, 3]
    assert dropped(choice([0, 9, 2, 0, 3, 1, 8, 0], 2, replace(config, pool=1))) == [3, 5]
    # Truncated, neither wrapped nor moved: an end ranks by what is there.
    assert dropped(choice([0, 1, 5, 9, 9, 9], 1, replace(FREE, pool=3))) == [0]
    assert dropped(choice([9, 9, 9, 5, 1, 0], 1, replace(FREE, pool=3))) == [5]
    assert dropped(choice([9, 9, 9, 9, 5, 1, 0], 1, replace(FREE, pool=5))) == [6]


def test_block_rank_sums_pooled_ranks_and_skips_cut_blocks():
    config = replace(FREE, granularity="block", recent_tokens=1)
    # 7 tokens, 6 eligible; the last, half block is never a candidate though it scores 0.
    assert dropped(choice([4, 4, 1, 5, 3, 2, 0], 2, config)) == [4, 5]
    # Pooled ranks 4 4 | 5 5 | 5 3: a tie, so the older goes. Then 4 4 | 9 9 | 9 3: no tie.
    assert dropped(choice([4, 4, 1, 5, 3, 2, 0], 2, replace(config, pool=3))) == [0, 1]
    assert dropped(choice([4, 4, 1, 9, 3, 2, 0], 2, replace(config, pool=3))) == [0, 1]


# --- following the engine ------------------------------------------------------------------------


STEPS = [30, *[1] * 20]


@pytest.fixture(scope="module")
def truth(models) -> OracleResult:
    return Oracle(models["llama"]).run(tokens(50), STEPS, BASE)


def follow_run(models, follow, config=BASE, **options) -> OracleResult:
    return Oracle(models["llama"]).run(tokens(50), STEPS, config, follow, **options)


def test_follow_accepts_the_true_choice_in_any_order(models, truth):
    engine = [{i: t.flip(1).int() for i, t in event.items()} for event in as_follow(truth)]
    result = follow_run(models, engine)
    assert same_kept(result, truth)
    assert torch.equal(result.logits, truth.logits)
    assert (result.num_followed, result.num_choices) == (0, truth.num_choices)
    assert truth.num_choices == 4 * (truth.event_tokens[-1] - truth.kept[-1][0].shape[1])


def swap(engine, event: int, layer: int, head: int, drop: int, keep: int):
    row = engine[event][layer][head]
    assert (row == drop).sum() == 1
    assert not (row == keep).any()
    row[row == drop] = keep


@pytest.mark.parametrize("event", [0, 3])
def test_follow_refuses_a_wrong_choice(models, truth, event):
    engine = as_follow(truth)
    engine = [{i: t.clone() for i, t in e.items()} for e in engine]
    before = range(30) if event == 0 else [*truth.kept[event - 1][1][0].tolist(), 40, 41, 42, 43]
    mine = truth.kept[event][1][0].tolist()
    victim = next(p for p in before if p not in mine and p >= 4)
    swap(engine, event, 1, 0, drop=mine[5], keep=victim)
    with pytest.raises(OracleMismatch, match="not the lowest ranks") as error:
        follow_run(models, engine)
    assert (error.value.event, error.value.layer, error.value.head) == (event, 1, 0)
    assert str(victim) in str(error.value)
    assert str(mine[5]) in str(error.value)


def corrupt(name: str, row: torch.Tensor) -> torch.Tensor:
    row = row.clone()
    if name == "twice":
        row[1, 5] = row[1, 6]
    elif name == "pinned":
        row[1, 2] = next(p for p in range(4, 26) if p not in row[1].tolist())
    elif name == "recent":
        row[1, -1] = next(p for p in range(4, 26) if p not in row[1].tolist())
    elif name in ("future", "negative"):
        row[1, 5] = 30 if name == "future" else -1
    elif name == "fewer":
        row = row[:, 1:]
    elif name == "head":
        row = row[:1]
    elif name == "float":
        row = row.float()
    return row


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("twice", "kept twice"),
        ("pinned", "protected"),
        ("recent", "protected"),
        ("future", "not live"),
        ("negative", "not live"),
        ("fewer", "not integers"),
        ("head", "not integers"),
        ("float", "not integers"),
    ],
)
def test_follow_refuses_impossible_sets_whatever_the_tolerance(models, truth, name, message):
    engine = as_follow(truth)
    engine[0] = engine[0] | {1: corrupt(name, engine[0][1])}
    with pytest.raises(OracleMismatch, match=message) as error:
        follow_run(models, engine, follow_rtol=1e9)
    assert (error.value.event, error.value.layer) == (0, 1)


def test_follow_refuses_a_position_evicted_earlier(models, truth):
    engine = [{i: t.clone() for i, t in event.items()} for event in as_follow(truth)]
    first, second = engine[0][0][0].tolist(), engine[1][0][0]
    second[5] = next(p for p in range(4, 26) if p not in first)
    with pytest.raises(OracleMismatch, match="not live"):
        follow_run(models, engine, follow_rtol=1e9)


def test_follow_refuses_half_a_block(models):
    config = replace(BASE, granularity="block")
    truth = follow_run(models, None, config)
    engine = as_follow(truth)
    row = engine[0][0].clone()
    row[0, 5] = next(p for p in range(4, 24) if p not in row[0].tolist())
    engine[0] = engine[0] | {0: row}
    with pytest.raises(OracleMismatch, match="in part"):
        follow_run(models, engine, config, follow_rtol=1e9)


def test_follow_needs_every_event_and_every_evicted_layer(models, truth):
    engine = as_follow(truth)
    for wrong in (engine[:-1], [*engine, engine[-1]], []):
        with pytest.raises(ValueError, match="follow has"):
            follow_run(models, wrong)
    with pytest.raises(ValueError, match="exactly the layers"):
        follow_run(models, [{0: event[0]} for event in engine])
    hybrid = Oracle(models["gemma3"]).run(tokens(50), STEPS, BASE)
    assert [list(event) for event in as_follow(hybrid)] == [[1]] * len(hybrid.kept)
    again = Oracle(models["gemma3"]).run(tokens(50), STEPS, BASE, as_follow(hybrid))
    assert same_kept(again, hybrid)


def test_follow_takes_exact_ties_and_goes_on_from_there(models):
    """Pooling makes equal ranks: the engine's other victim is taken, and counted as a tie."""
    config = replace(BASE, budget_tokens=20, pool=5)
    truth = follow_run(models, None, config)
    engine, found = as_follow(truth), None
    scores = Oracle(models["llama"]).run(tokens(30), [30], OracleConfig(4, None)).final_scores
    for layer in (0, 1):
        made = Choice.make(scores[layer], torch.arange(30).expand(2, 30), 12, config)
        for head in (0, 1):
            edge = made.ranks[head, made.drop[head]].max()
            tied = made.ranks[head] == edge
            inside, outside = tied & made.drop[head], tied & ~made.drop[head]
            if outside.any():
                found = layer, head, int(inside.nonzero()[0]) + 4, int(outside.nonzero()[0]) + 4
    assert found is not None, "the model must have a tie at the threshold"
    layer, head, drop, keep = found
    engine = [{i: t.clone() for i, t in engine[0].items()}]
    swap(engine, 0, layer, head, drop=keep, keep=drop)
    result = Oracle(models["llama"]).run(tokens(30), [30], config, engine)
    assert (result.num_followed, result.num_followed_equal) == (1, 1)
    got = result.final_positions[layer][head]
    assert torch.equal(got, engine[0][layer][head].sort().values)
    assert got.shape == result.final_scores[layer][head].shape


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (0.9e-5, True), (1.1e-5, False)])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e6])
def test_near_tie_tolerance_is_relative(gap, near, scale):
    scores = [scale * s for s in (9, 1.0, 5, 1.0 + gap, 7, 8)]
    made = choice(scores, 1, FREE)
    assert dropped(made) == [1]
    engine = torch.tensor([[0, 1, 2, 4, 5]])  # dropped 3 instead
    if near:
        assert made.settle(engine, 1e-5, 0, 0) == (1, int(gap == 0))
        assert dropped(made) == [3]
    else:
        with pytest.raises(OracleMismatch):
            made.settle(engine, 1e-5, 0, 0)


@pytest.mark.parametrize("scores", [[1.0, 1.0, 1.000001, 3.0], [0.1, 1.0, 1.000001, 1.000001]])
def test_every_pair_must_be_near(scores):
    """One near pair must not excuse a far one beside it."""
    made = choice(scores, 2, FREE)
    assert dropped(made) == [0, 1]
    with pytest.raises(OracleMismatch, match="not the lowest ranks"):
        made.settle(torch.tensor([[0, 1]]), 1e-5, 0, 0)
    assert made.settle(torch.tensor([[0, 3]]), 10.0, 0, 0) == (1, 0)


def test_config_refuses_what_cannot_work():
    for wrong, message in (
        ({"budget_tokens": 18}, "budget 18: need a multiple of 4"),
        ({"budget_tokens": 8}, "at least 12"),
        ({"pool": 2}, "pool"),
        ({"granularity": "head"}, "granularity"),
        ({"half_life_tokens": 0.0}, "half_life"),
        ({"block_size": 0}, "size out of range"),
        ({"recent_tokens": -1}, "size out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(BASE, **wrong)


# --- the real model ------------------------------------------------------------------------------


def test_real_model():
    oracle = Oracle(MODEL)
    ids = torch.randint(1000, 20000, (192,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        want = oracle.model(torch.tensor([ids]), use_cache=False).logits[0]
    full = oracle.run(ids, [128, 64], OracleConfig(16, None))
    torch.testing.assert_close(full.logits, want, atol=2e-3, rtol=1e-3)
    config = OracleConfig(16, 64, 1, 16)
    steps = [100, 60, *[1] * 32]
    cut = oracle.run(ids, steps, config)
    assert len(cut.kept) == 4
    assert cut.kept[-1][29].shape == (3, 48)
    assert torch.equal(oracle.run(ids, steps, config, as_follow(cut)).logits, cut.logits)
