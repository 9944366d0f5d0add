"""How many blocks a request holds, and that every block comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm import LLM

from tests.engines import engine
from tests.stepping import Stepper
from tests.tiny_models import random_prompt, save

BUDGET, BLOCK, CHUNK = 256, 32, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save("llama-gqa", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with engine(
        model, policy={"budget": BUDGET}, skip_tokenizer_init=True, num_gpu_blocks_override=40
    ) as llm:
        yield llm


def test_blocks_held_stay_bounded(llm: LLM) -> None:
    stepper = Stepper(llm)
    free = stepper.free_blocks
    in_chunk, in_decode = -(-(BUDGET + CHUNK) // BLOCK) + 1, -(-BUDGET // BLOCK) + 1
    most_in_chunk = most_in_decode = 0

    def watch() -> None:
        nonlocal most_in_chunk, most_in_decode
        held = stepper.held_blocks()
        for request in stepper.requests():
            if len(request.output_token_ids) > 1:
                most_in_decode = max(most_in_decode, held[request.request_id])
            else:
                most_in_chunk = max(most_in_chunk, held[request.request_id])

    for i, length in enumerate((10, 300, 1500)):
        stepper.add(str(i), random_prompt(length, seed=i), 200)
    stepper.run(watch)
    assert BUDGET // BLOCK <= most_in_decode <= in_decode
    assert most_in_decode < most_in_chunk <= in_chunk
    stepper.assert_idle(free)


def test_free_count_returns_after_abort(llm: LLM) -> None:
    """Aborted in prefill, in decode, and in the very step that evicts."""
    stepper = Stepper(llm)
    free = stepper.free_blocks
    for i, steps_before_abort in enumerate((1, 2, 3, 5, 12, 13, 14, 40)):
        request_id = f"abort-{i}"
        # 244 + 12 tokens fill the budget, so the step that computes token 256 evicts.
        stepper.add(request_id, random_prompt(700 if i < 4 else 244, seed=i), 200)
        for _ in range(steps_before_abort):
            stepper.step()
        stepper.abort(request_id)
        stepper.run()
        stepper.assert_idle(free)


def test_preemption_returns_blocks_and_ends(llm: LLM) -> None:
    """Prompts far over the budget on a pool that can't hold them all: preempted, resumed, finished."""
    stepper = Stepper(llm)
    free = stepper.free_blocks
    preemptions: dict[str, int] = {}

    def watch() -> None:
        for request in stepper.scheduler.requests.values():
            preemptions[request.request_id] = request.num_preemptions

    for i in range(8):
        stepper.add(str(i), random_prompt(60 + 90 * i, seed=i), 220)
    tokens = stepper.run(watch)
    assert [len(tokens[str(i)]) for i in range(8)] == [220] * 8
    assert sum(preemptions.values()) > 0, "the pool was not tight enough to test anything"
    # No churn: resuming needs a bounded number of blocks, whatever the request's length.
    assert max(preemptions.values()) <= 3
    stepper.assert_idle(free)
