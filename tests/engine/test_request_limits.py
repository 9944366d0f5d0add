"""Requests with limits of their own, side by side on one engine: each as on an engine with those limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import MODEL, Completion, complete, engine, greedy
from tests.oracle import Oracle
from tests.tiny_models import random_prompt, save

pytestmark = pytest.mark.e2e

NEW_TOKENS = 72
SERVER: dict[str, Any] = {"budget": 256, "recent": 40}
ASKED: list[dict[str, Any] | None] = [
    None,
    {"kv_budget": 128},
    {"kv_pin_tokens": 128},
    {"kv_budget": 192, "kv_pin_tokens": 64, "kv_report": 1},
]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(MODEL)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"score_half_life": 32.0, "score_pool": 15}, id="half-life-and-pool"),
        pytest.param({"granularity": "block"}, id="block"),
    ],
)
def test_each_request_keeps_what_the_oracle_keeps(
    settings: dict[str, Any], oracle: Oracle, text_ids: list[int]
) -> None:
    policy = {**SERVER, **settings}
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate([300, 460, 600, 333])]
    configs = []
    for asked in ASKED:
        own = {
            "budget": (asked or {}).get("kv_budget", 256),
            "pin_tokens": (asked or {}).get("kv_pin_tokens", 32),
        }
        configs.append(oracle_config({**policy, **own}))
    with engine(policy={**policy, "trace": True}, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, configs, prompts, NEW_TOKENS, extra_args=ASKED)


@pytest.mark.parametrize("prompt_budget", [448, 1.0])
def test_a_prompt_is_cut_once_it_is_read(prompt_budget: float, oracle: Oracle, text_ids: list[int]) -> None:
    """In chunks of 256 tokens: under its budget nothing goes until then, over it what is over."""
    policy = {"budget": 256, "recent": 40, "score_half_life": 32.0, "score_pool": 15}
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate([200, 430, 700, 1000])]
    asked: list[dict[str, Any] | None] = [None, {"kv_budget": 128}, None, {"kv_pin_tokens": 64}]
    configs = []
    for prompt, own in zip(prompts, asked, strict=True):
        limits = {
            "budget": (own or {}).get("kv_budget", 256),
            "pin_tokens": (own or {}).get("kv_pin_tokens", 32),
        }
        config = oracle_config({**policy, **limits})
        tokens = 2048 if prompt_budget == 1.0 else int(prompt_budget)
        configs.append(replace(config, prompt_budget_tokens=tokens, num_prompt_tokens=len(prompt)))
    settings = {**policy, "prompt_budget": prompt_budget, "trace": True}
    with engine(policy=settings, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, configs, prompts, NEW_TOKENS, extra_args=asked)


def test_prompts_that_fit_no_longer_depend_on_where_chunks_end(text_ids: list[int]) -> None:
    """Cut once, a prompt has the same answer whatever else is served with it."""
    policy = {"budget": 256, "recent": 40, "score_half_life": 32.0, "score_pool": 15, "prompt_budget": 1.0}
    prompts = [text_ids[100 * i : 100 * i + length] for i, length in enumerate([700, 613, 540, 455, 377])]
    with engine(policy=policy, enable_prefix_caching=False) as llm:
        together = complete(llm, prompts, greedy(40))
        alone = [complete(llm, [prompt], greedy(40))[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


@pytest.mark.parametrize("order", ["sliding-first", "full-first"])
def test_a_model_that_mixes_kinds_of_layers(order: str, tmp_path: Path) -> None:
    """Its full-attention layers evict by the request's budget, and `none` is refused."""
    model = save(f"gemma3-{order}", tmp_path)
    policy = {"budget": 256, "recent": 40, "score_half_life": 64.0, "score_pool": 3}
    small = oracle_config({**policy, "budget": 128})
    oracle = Oracle(model)
    prompts = [random_prompt(400, seed=1), random_prompt(300, seed=2)]
    with engine(
        str(model), policy={**policy, "trace": True}, enable_prefix_caching=False, skip_tokenizer_init=True
    ) as llm:
        asked: list[dict[str, Any] | None] = [{"kv_budget": 128}, None]
        assert_engine_agrees(llm, oracle, [small, oracle_config(policy)], prompts, 80, extra_args=asked)
        with pytest.raises(VLLMValidationError, match="this model mixes kinds of attention layers"):
            complete(llm, prompts, greedy(4, extra_args={"kv_policy": "none"}))


# --- one engine from here on, since there can be one at a time --------------------------------------------


@pytest.fixture(scope="module")
def plain(text_ids: list[int]) -> Completion:
    """What vLLM answers without a policy."""
    with engine() as llm:
        (completion,) = complete(llm, [text_ids[100:900]], greedy(60))
    return completion


@pytest.fixture(scope="module")
def small_pool(plain: Completion) -> Iterator[LLM]:
    """40 blocks for requests, 1,280 tokens, while a sequence may have 2,048."""
    with engine(policy=SERVER, num_gpu_blocks_override=41, async_scheduling=True) as llm:
        yield llm


def test_a_request_without_the_policy_answers_as_plain_vllm(
    small_pool: LLM, plain: Completion, text_ids: list[int]
) -> None:
    prompts = [text_ids[:600], text_ids[100:900], text_ids[50:450]]
    params = [greedy(60), greedy(60, extra_args={"kv_policy": "none"}), greedy(60)]
    # They don't fit together, so some are computed again, which must not change their limits.
    served = complete(small_pool, prompts, params)
    assert [len(c.token_ids) for c in served] == [60, 60, 60]
    assert served[1].token_ids == plain.token_ids
    assert served[1].logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("extra_args", "prompt_tokens", "max_tokens", "message"),
    [
        ({"kv_budget": 300}, 100, 10, "kv_budget=300: it is over the server's budget of 256"),
        ({"kv_polcy": "none"}, 100, 10, "Write kv_policy"),
        ({"kv_policy": "none"}, 1200, 81, "prompt and answer may take 1281 tokens, .* holds 1280"),
        ({"kv_policy": "none"}, 100, None, "prompt and answer may take 2048 tokens, .* holds 1280"),
    ],
)
def test_what_cannot_be_is_refused_before_the_engine(
    small_pool: LLM,
    text_ids: list[int],
    extra_args: dict[str, Any],
    prompt_tokens: int,
    max_tokens: int | None,
    message: str,
) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        complete(small_pool, [text_ids[:prompt_tokens]], greedy(max_tokens, extra_args=extra_args))
    assert not small_pool.llm_engine.has_unfinished_requests()
    assert complete(small_pool, [text_ids[:40]], greedy(3))[0].token_ids


def test_the_longest_that_fits_is_served(small_pool: LLM, text_ids: list[int]) -> None:
    params = greedy(80, extra_args={"kv_policy": "none"})
    (served,) = complete(small_pool, [text_ids[:1200]], params)
    assert len(served.token_ids) == 80


def test_nothing_is_remembered_of_requests_that_ended(small_pool: LLM, text_ids: list[int]) -> None:
    core = small_pool.llm_engine
    core.add_request("ends", {"prompt_token_ids": text_ids[:300]}, greedy(4, extra_args={"kv_budget": 128}))
    core.add_request(
        "leaves", {"prompt_token_ids": text_ids[:300]}, greedy(99, extra_args={"kv_budget": 128})
    )
    for _ in range(3):
        core.step()
    core.abort_request(["leaves"])
    while core.has_unfinished_requests():
        core.step()
    complete(small_pool, [text_ids[:40]], greedy(3))  # the step in which the worker hears of it
    scheduler = core.engine_core.engine_core.scheduler
    assert [len(manager.requests) for manager in scheduler._managers] == [0]
    assert small_pool.collective_rpc(lambda worker: len(worker.requests)) == [0]
