"""What later requests take from the prefix cache changes nothing but the work."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm import LLM

from tests.engines import engine, greedy
from tests.integrity import check_integrity
from tests.stepping import Stepper
from tests.tiny_models import random_prompt, save
from vllm_h2o.layout import PagedLayer

BLOCK, PINNED, BUDGET, PROMPT_BUDGET = 32, 32, 256, 1024
HALF_LIFE = 4  # 24 of them, 96 tokens, are what every request computes itself
OWN = 24 * HALF_LIFE
H2O: dict[str, Any] = {"name": "h2o", "score_half_life": HALF_LIFE}
POLICIES: dict[str, dict[str, Any]] = {
    "h2o": H2O,
    "blocks": {**H2O, "granularity": "block", "score_rank": "mean"},
    "snapkv": {"name": "snapkv"},
    "keydiff": {"name": "keydiff", "score_pool": 3},
    "random": {"name": "random"},
}


@dataclass
class Turn:
    """One request: what it generated, what it took from the cache, and what it kept behind its prompt."""

    tokens: list[int]
    cached_tokens: int
    kept: list[list[int]]
    """Positions by KV head of the first evicting layer, sorted; empty where nothing tracks them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama-gqa", tmp_path_factory.mktemp("models")))


def serve(model: str, policy: dict[str, Any], *, caching: bool = True, **options: Any) -> Any:
    settings = {"budget": BUDGET, "prompt_budget": PROMPT_BUDGET, **policy}
    settings = {key: value for key, value in settings.items() if value is not None}
    return engine(model, policy=settings, skip_tokenizer_init=True, enable_prefix_caching=caching, **options)


def ask(llm: LLM, prompt: list[int], max_tokens: int = 40, **extra_args: Any) -> Turn:
    """Serve one request alone."""
    stepper = Stepper(llm)
    name = str(random.random())
    stepper.add(name, prompt, greedy(max_tokens, detokenize=False, extra_args=extra_args or None))
    kept: list[list[int]] = []
    while stepper.engine.has_unfinished_requests():
        stepper.step()
        check_integrity(stepper)
        if len(stepper.tokens[name]) == 1 and max_tokens > 1:
            kept = kept_positions(stepper, name, len(prompt))
    return Turn(stepper.tokens[name], stepper.cached_tokens[name], kept)


def kept_positions(stepper: Stepper, name: str, num_prompt_tokens: int) -> list[list[int]]:
    """Of a request that has read its prompt."""
    table = stepper.blocks_of(name)
    # The scheduler frees in the next step what the worker has dropped in this one.
    limits = stepper.manager.requests.of(stepper._internal(name))
    gone = limits.evicted_blocks(num_prompt_tokens, BLOCK)
    held = table[: limits.pinned_blocks] + table[limits.pinned_blocks + gone :]
    context = stepper.runner.vllm_config.compilation_config.static_forward_context
    layers = [layer for layer in context.values() if getattr(layer.impl, "query_ring", None) is not None]
    views = PagedLayer.from_cpu_cache(
        layers[0].kv_cache, isa=layers[0].isa, positions=stepper.manager.policy.tracks_positions
    )
    if views.positions is None:
        return []
    blocks = torch.tensor([block.block_id for block in held])
    live = num_prompt_tokens - gone * BLOCK
    return [sorted(head.flatten()[:live].tolist()) for head in views.positions[blocks].transpose(0, 1)]


def conversation(llm: LLM, *, turns: int = 3) -> list[Turn]:
    """Every prompt is the one before, its answer and something new."""
    said, prompt = [], random_prompt(600, seed=1)
    for turn in range(turns):
        said.append(ask(llm, prompt))
        prompt = prompt + said[-1].tokens + random_prompt(50, seed=10 + turn)
    return said


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_conversations_go_on_as_without_caching(model: str, policy: dict[str, Any]) -> None:
    # In one chunk each: snapkv counts the queries of a short last chunk beside those of the one before.
    with serve(model, policy, caching=False, max_num_batched_tokens=1024) as llm:
        expected = conversation(llm)
    with serve(model, policy, max_num_batched_tokens=1024) as llm:
        found = conversation(llm)
        own = llm.llm_engine.engine_core.engine_core.scheduler._managers[0].reuse._num_scored
    assert [turn.tokens for turn in found] == [turn.tokens for turn in expected]
    assert [turn.kept for turn in found] == [turn.kept for turn in expected]
    assert bool(found[0].kept) == (policy.get("score_pool", 2) > 1 and policy["name"] != "random")
    # What a prompt of 600 gives back when it is read, and the one behind it of 690.
    gone = [PINNED + ((length - BUDGET) // BLOCK + 1) * BLOCK for length in (600, 690)]
    usable = [(length - own) // BLOCK * BLOCK for length in (690, 780)]
    assert [turn.cached_tokens for turn in found] == [0, *map(min, gone, usable)]


@pytest.fixture(scope="module")
def reading(model: str) -> Iterator[dict[str, Turn]]:
    """What is answered without caching to one text with different ends."""
    with serve(model, H2O, caching=False) as llm:
        yield {name: ask(llm, prompt, **extra) for name, (prompt, extra) in readers().items()}


def readers() -> dict[str, tuple[list[int], dict[str, Any]]]:
    """Prompts that begin alike, shorter and longer ones, and limits of their own."""
    text = random_prompt(800, seed=5)
    lengths = {"whole": 800, "half": 400, "within budget": 150, "just over": 270}
    prompts = {name: text[:n] + random_prompt(40, seed=n) for name, n in lengths.items()}
    limits: dict[str, dict[str, Any]] = {
        "less": {"kv_budget": 128}, "pinned": {"kv_pin_tokens": 128}, "spared": {"kv_policy": "none"},
    }  # fmt: skip
    return {
        **{name: (prompt, {}) for name, prompt in prompts.items()},
        **{name: (text + random_prompt(30, seed=6), extra) for name, extra in limits.items()},
    }


def test_one_text_for_many(model: str, reading: dict[str, Turn]) -> None:
    """Whoever comes first, and all at once: each drops other tokens, of copies of its own."""
    with serve(model, H2O, num_gpu_blocks_override=300) as llm:
        names = list(reading)
        for order in (names, names[::-1]):
            llm.reset_prefix_cache()
            for name in order:
                prompt, extra = readers()[name]
                turn = ask(llm, prompt, **extra)
                assert (turn.tokens, turn.kept) == (reading[name].tokens, reading[name].kept), name
        stepper = Stepper(llm)
        for name, (prompt, extra) in readers().items():
            stepper.add(name, prompt, greedy(40, detokenize=False, extra_args=extra or None))
        stepper.run(lambda: check_integrity(stepper))
        assert stepper.tokens == {name: turn.tokens for name, turn in reading.items()}
        # The spared one has left all of the text behind.
        assert stepper.cached_tokens["whole"] == (840 - OWN) // BLOCK * BLOCK
        assert stepper.cached_tokens["within budget"] == 189 // BLOCK * BLOCK  # 190 + 40 lose nothing


def test_blocks_that_are_being_computed_are_not_copied(model: str, reading: dict[str, Turn]) -> None:
    """Prompts that arrive together have nothing yet to take from each other but the pinned block."""
    prompt, _ = readers()["whole"]
    with serve(model, H2O, max_num_batched_tokens=2048) as llm:
        stepper = Stepper(llm)
        for name in "abc":
            stepper.add(name, prompt, 40)
        stepper.run(lambda: check_integrity(stepper))
        assert stepper.tokens == dict.fromkeys("abc", reading["whole"].tokens)
        assert set(stepper.cached_tokens.values()) <= {0, PINNED}


def test_aborted_while_reading(model: str, reading: dict[str, Turn]) -> None:
    """What was computed of it is as good as if it had gone on."""
    prompt, _ = readers()["whole"]
    with serve(model, H2O) as llm:
        stepper = Stepper(llm)
        stepper.add("first", prompt, 40)
        for _ in range(2):  # chunks of 256
            stepper.step()
        stepper.abort("first")
        turn = ask(llm, prompt)
        assert (turn.tokens, turn.kept) == (reading["whole"].tokens, reading["whole"].kept)
        assert turn.cached_tokens == 512


def test_short_answers_need_no_scores(model: str) -> None:
    """A request that can't reach its budget takes all but its last token."""
    prompt = random_prompt(200, seed=3)
    with serve(model, H2O) as llm:
        first, second = (ask(llm, prompt, 20) for _ in range(2))
        assert first.tokens == second.tokens
        assert (first.cached_tokens, second.cached_tokens) == (0, 192)
        # One that may grow past it computes what its scores come from.
        assert ask(llm, prompt, 100).cached_tokens == (200 - OWN) // BLOCK * BLOCK


def test_pools_without_room_for_copies(model: str, reading: dict[str, Turn]) -> None:
    """A pool that holds the prompt once: nothing waits for ever, and nothing else changes."""
    prompt, _ = readers()["whole"]
    blocks, needed = 44, -(-len(prompt) // BLOCK)
    with serve(model, H2O, num_gpu_blocks_override=blocks) as llm:
        for most in (0, (blocks - needed) * BLOCK, (blocks - needed) * BLOCK):
            turn = ask(llm, prompt)
            assert (turn.tokens, turn.kept) == (reading["whole"].tokens, reading["whole"].kept)
            assert turn.cached_tokens == most


def test_the_papers_sums_share_pinned_tokens_only(model: str) -> None:
    """They count every query for ever, so none may be left out."""
    prompt, _ = readers()["whole"]
    with serve(model, {"name": "h2o", "preset": "paper", "pin_tokens": PINNED}) as llm:
        first, second = (ask(llm, prompt) for _ in range(2))
        assert first.tokens == second.tokens
        assert second.cached_tokens == PINNED


def test_prompts_that_are_cut_while_they_are_read(model: str) -> None:
    """Without a prompt budget only what is read before the first cut may come from others."""
    prompt, _ = readers()["whole"]
    policy = {**H2O, "prompt_budget": None}
    with serve(model, policy, caching=False, max_num_batched_tokens=2048) as llm:
        expected = [ask(llm, prompt), ask(llm, prompt[:200], 20)]
    with serve(model, policy, max_num_batched_tokens=2048) as llm:
        ask(llm, prompt[:200], 20)
        found = [ask(llm, prompt), ask(llm, prompt[:200], 20)]
        assert [(turn.tokens, turn.kept) for turn in found] == [(turn.tokens, turn.kept) for turn in expected]
        assert [turn.cached_tokens for turn in found] == [192, 192]
