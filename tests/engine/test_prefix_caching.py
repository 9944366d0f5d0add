"""Only pinned blocks are shared, and sharing them changes nothing but the work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM

from tests.engines import engine, greedy
from tests.stepping import Stepper, solo
from tests.tiny_models import random_prompt, save

PINNED = 96
POLICY: dict[str, Any] = {"budget": 256, "pin_tokens": PINNED, "recent": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama-gqa", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def uncached(model: str) -> dict[str, list[int]]:
    """Reference outputs without prefix caching; chunk ends don't matter below 1,024 tokens."""
    with _engine(model, enable_prefix_caching=False) as llm:
        outputs: dict[str, list[int]] = {}
        for name, prompt in conversations().items():
            outputs[name] = solo(llm, prompt, 120)
            outputs[f"{name}+1"] = solo(llm, prompt + outputs[name] + random_prompt(30, seed=9), 60)
        return outputs


@pytest.fixture(scope="module")
def llm(model: str, uncached: dict[str, list[int]]) -> Iterator[LLM]:
    with _engine(model) as llm:
        yield llm


def _engine(model: str, **options: Any) -> Any:
    return engine(model, policy=POLICY, skip_tokenizer_init=True, max_num_batched_tokens=1024, **options)


def conversations() -> dict[str, list[int]]:
    """A long and a short prompt behind one shared 128-token beginning."""
    shared = random_prompt(128, seed=7)
    return {
        "long": shared + random_prompt(500, seed=1),
        "short": shared + random_prompt(40, seed=2),
        "other": random_prompt(300, seed=3),
    }


def hits(stepper: Stepper, prompt: list[int], name: str, max_tokens: int) -> tuple[list[int], int]:
    """Tokens of the request, and how many prompt tokens came from the prefix cache."""
    stepper.add(name, prompt, max_tokens)
    tokens = stepper.run()[name]
    return tokens, stepper.cached_tokens[name]


def test_hits_end_at_the_pinned_tokens(llm: LLM, uncached: dict[str, list[int]]) -> None:
    llm.reset_prefix_cache()
    stepper = Stepper(llm)
    free = stepper.free_blocks
    first, cached = hits(stepper, conversations()["long"], "long", 120)
    assert (first, cached) == (uncached["long"], 0)
    for name in ("short", "long"):
        again, cached = hits(stepper, conversations()[name], name, 120)
        assert cached == PINNED
        assert again == uncached[name]
    stepper.assert_idle(free)


def test_second_turn_after_eviction(llm: LLM, uncached: dict[str, list[int]]) -> None:
    """Turn 2 repeats turn 1 and its output, most of which was evicted: nothing stale may be found."""
    llm.reset_prefix_cache()
    stepper = Stepper(llm)
    for name, prompt in conversations().items():
        first, _ = hits(stepper, prompt, name, 120)
        second, cached = hits(stepper, prompt + first + random_prompt(30, seed=9), f"{name}+1", 60)
        assert (first, second) == (uncached[name], uncached[f"{name}+1"])
        assert cached == PINNED


def test_shared_blocks_while_others_evict(llm: LLM, uncached: dict[str, list[int]]) -> None:
    """Several requests read the same pinned blocks while each evicts its own."""
    llm.reset_prefix_cache()
    stepper = Stepper(llm)
    hits(stepper, conversations()["short"], "warm", 4)
    for name in ("long", "short"):
        stepper.add(name, conversations()[name], 120)
        stepper.step()
    tables = [
        [block.block_id for block in stepper.manager.req_to_blocks[request.request_id][: PINNED // 32]]
        for request in stepper.requests()
    ]
    assert tables[0] == tables[1]
    tokens = stepper.run()
    assert tokens["long"] == uncached["long"]
    assert tokens["short"] == uncached["short"]


def test_reset_forgets(llm: LLM, uncached: dict[str, list[int]]) -> None:
    stepper = Stepper(llm)
    hits(stepper, conversations()["other"], "fill", 10)
    assert llm.reset_prefix_cache()
    tokens, cached = hits(stepper, conversations()["other"], "other", 120)
    assert (tokens, cached) == (uncached["other"], 0)


def test_prompt_logprobs_with_caching(llm: LLM, model: str) -> None:
    """Twice each, short and long: the second run may not read the cache's stale or missing values."""
    llm.reset_prefix_cache()
    prompts = [conversations()["short"], conversations()["long"]]
    params = greedy(4, prompt_logprobs=1, detokenize=False)
    for prompt in prompts:
        first, second = (
            llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0] for _ in range(2)
        )
        values = [
            [step[token].logprob for step, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
            for output in (first, second)
        ]
        assert len(values[0]) == len(prompt) - 1
        assert values[0] == pytest.approx(values[1], abs=1e-5)
