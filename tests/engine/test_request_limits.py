"""Requests with limits of their own, side by side on one engine: each as on an engine with those limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import LLM
from vllm.exceptions import VLLMValidationError

from tests.agreement import assert_engine_agrees, oracle_config
from tests.engines import MODEL, Completion, complete, engine, greedy, scheduling, take_traces
from tests.integrity import check_integrity
from tests.oracle import Oracle
from tests.stepping import Stepper
from tests.tiny_models import first_layers, random_prompt, save
from vllm_h2o.engine import scheduler

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
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model's first 8 of 30 layers."""
    return str(first_layers(Path(MODEL), 8, tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def oracle(short: str) -> Oracle:
    return Oracle(short)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"score_half_life": 32.0, "score_pool": 15}, id="half-life-and-pool"),
        pytest.param({"granularity": "block"}, id="block"),
    ],
)
def test_each_request_keeps_what_the_oracle_keeps(
    settings: dict[str, Any], short: str, oracle: Oracle, text_ids: list[int]
) -> None:
    policy = {**SERVER, **settings}
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate([300, 460, 400, 333])]
    configs = []
    for asked in ASKED:
        own = {
            "budget": (asked or {}).get("kv_budget", 256),
            "pin_tokens": (asked or {}).get("kv_pin_tokens", 32),
        }
        configs.append(oracle_config({**policy, **own}))
    with engine(short, policy={**policy, "trace": True}, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, configs, prompts, NEW_TOKENS, extra_args=ASKED)


@pytest.mark.parametrize("prompt_budget", [448, 1.0])
def test_a_prompt_is_cut_once_it_is_read(
    prompt_budget: float, short: str, oracle: Oracle, text_ids: list[int]
) -> None:
    """In chunks of 256 tokens: under its budget nothing goes until then, over it what is over."""
    policy = {"budget": 256, "recent": 40, "score_half_life": 32.0, "score_pool": 15}
    # The last chunk of the last one, when it is alone, is one token.
    lengths = [430, 700, 513]
    prompts = [text_ids[150 * i : 150 * i + length] for i, length in enumerate(lengths)]
    asked: list[dict[str, Any] | None] = [{"kv_budget": 128}, {"kv_pin_tokens": 64}, None]
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
    with engine(short, policy=settings, enable_prefix_caching=False) as llm:
        assert_engine_agrees(llm, oracle, configs, prompts, NEW_TOKENS, extra_args=asked)
        assert_engine_agrees(llm, oracle, configs[2:], prompts[2:], 4)


def test_prompts_that_fit_no_longer_depend_on_where_chunks_end(short: str, text_ids: list[int]) -> None:
    """Cut once, a prompt has the same answer whatever else is served with it."""
    policy = {"budget": 256, "recent": 40, "score_half_life": 32.0, "score_pool": 15, "prompt_budget": 1.0}
    prompts = [text_ids[100 * i : 100 * i + length] for i, length in enumerate([700, 540, 377])]
    with engine(short, policy=policy, enable_prefix_caching=False) as llm:
        together = complete(llm, prompts, greedy(40))
        alone = [complete(llm, [prompt], greedy(40))[0] for prompt in prompts]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_prefix_computed_without_the_policy_serves_those_under_it(
    kernels: str, short: str, oracle: Oracle, text_ids: list[int]
) -> None:
    """Its pinned block is shared, and has to be as if computed under the policy."""
    policy = {**SERVER, "score_half_life": 32.0, "score_pool": 15}
    prompt = text_ids[:520]
    with engine(short, policy={**policy, "trace": True, "kernels": kernels}) as llm:
        # Blocks that were others' before, so that they have positions of others.
        complete(llm, [text_ids[600:1500]], greedy(300))
        complete(llm, [prompt], greedy(2, extra_args={"kv_policy": "none"}))
        before = llm.llm_engine.engine_core.engine_core.scheduler
        assert before.kv_cache_manager.block_pool.cached_block_hash_to_block
        take_traces(llm)
        (completion,) = complete(llm, [prompt], greedy(NEW_TOKENS))
        ((trace,),) = llm.collective_rpc("take_kv_trace")
    kept = [positions for _, _, heads, _ in trace["kept"] for positions in heads]
    assert kept
    assert all(set(range(32)) <= set(positions) for positions in kept), "pinned tokens are kept"
    # The hit is the first step of the oracle's, which computes it.
    steps = [new for _, computed, new in trace["steps"]]
    assert sum(steps) == len(completion.fed_ids) - 32
    result = oracle.run(completion.fed_ids, [32, *steps], oracle_config(policy))
    logprobs = torch.log_softmax(result.logits[len(prompt) - 1 :], dim=-1)
    assert logprobs.argmax(dim=-1).tolist() == completion.token_ids


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
    with scheduling(is_async=True), engine(policy=SERVER, num_gpu_blocks_override=41) as llm:
        yield llm


def test_a_request_without_the_policy_answers_as_plain_vllm(
    small_pool: LLM, plain: Completion, text_ids: list[int]
) -> None:
    prompts = [text_ids[:200], text_ids[100:900], text_ids[50:250], text_ids[70:320]]
    params = [greedy(60, extra_args={"kv_policy": "none"} if i == 1 else None) for i in range(4)]
    served = complete(small_pool, prompts, params)
    assert [len(c.token_ids) for c in served] == [60] * 4
    assert served[1].token_ids == plain.token_ids
    assert served[1].logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_limits_survive_preemption(small_pool: LLM, text_ids: list[int]) -> None:
    """Five requests that keep everything grow until some have to be computed again; the answers stay."""
    free = {"kv_policy": "none"}
    prompts = [text_ids[80 * i : 80 * i + 190] for i in range(5)]
    alone = [complete(small_pool, [p], greedy(120, extra_args=free))[0].token_ids for p in prompts]
    stepper, preempted = Stepper(small_pool), []
    preempt = stepper.scheduler._preempt_request

    def note(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    stepper.scheduler._preempt_request = note
    try:
        for i, prompt in enumerate(prompts):
            stepper.add(f"free{i}", prompt, greedy(120, extra_args=free))
        tokens = stepper.run(lambda: check_integrity(stepper))
    finally:
        del stepper.scheduler._preempt_request
    assert preempted, "nobody had to give way"
    assert [tokens[f"free{i}"] for i in range(5)] == alone


def test_where_workers_know_no_limits_the_scheduler_takes_none(
    small_pool: LLM, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks would be freed that a GPU worker still reads, if a request came past the front end's checks."""
    stepper = Stepper(small_pool)
    params = greedy(4, extra_args={"kv_budget": 128})
    stepper.add("here", text_ids[:100], params)
    monkeypatch.setattr(scheduler, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    stepper.add("there", text_ids[:100], params)
    budgets = {
        name.rsplit("-", 1)[0]: stepper.manager.requests.of(name).budget_tokens
        for name in stepper.scheduler.requests
    }
    stepper.abort("there")  # this worker does know them
    stepper.run()
    assert budgets == {"here": 128, "there": 256}


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


def test_a_session_has_no_limits_of_its_own(small_pool: LLM) -> None:
    processor = small_pool.llm_engine.input_processor
    prompt = {"prompt_token_ids": [5, 6, 7]}
    tasks = small_pool.llm_engine.get_supported_tasks()
    with pytest.raises(VLLMValidationError, match="it can't have limits of its own"):
        processor.process_inputs("s", prompt, greedy(4, extra_args={"kv_budget": 128}), tasks, resumable=True)
    assert processor.process_inputs("s", prompt, greedy(4), tasks, resumable=True).resumable


def test_who_goes_around_the_checks_gets_the_policy(small_pool: LLM, text_ids: list[int]) -> None:
    """A wrong argument that the front end never saw must not end the engine."""
    core = small_pool.llm_engine
    request = core.input_processor.process_inputs(
        "odd", {"prompt_token_ids": text_ids[:300]}, greedy(4), core.get_supported_tasks()
    )
    request.sampling_params.extra_args = {"kv_budget": 1, "kv_report": 1}
    core.add_request("odd", request, request.sampling_params)
    while core.has_unfinished_requests():
        (output,) = core.step() or (None,)
    assert output is not None
    assert output.kv_transfer_params["kv_policy"]["budget_tokens"] == 256


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
