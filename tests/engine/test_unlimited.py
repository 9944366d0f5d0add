"""With a budget that no sequence reaches, outputs are plain vLLM's, whether scores are kept or not."""

from __future__ import annotations

import pytest

from tests.engines import Completion, complete, engine, greedy

PARAMS = greedy(40, prompt_logprobs=0)


def prompts(text_ids: list[int]) -> list[list[int]]:
    """24 prompts of 1 to 700 tokens: less than a block, exact blocks, several chunks."""
    lengths = [1, 2, 5, 16, 31, 32, 33, 64, 96, 100, 128, 200, 255, 256, 257, 300]
    lengths += [320, 400, 450, 512, 513, 600, 640, 700]
    return [text_ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def plain(text_ids: list[int]) -> list[Completion]:
    with engine() as llm:
        return complete(llm, prompts(text_ids), PARAMS)


@pytest.mark.parametrize(
    "budget", [pytest.param(1024, id="scored"), pytest.param(1.0, id="nothing-to-score")]
)
def test_budget_over_every_sequence_equals_plain_vllm(
    budget: float, plain: list[Completion], text_ids: list[int]
) -> None:
    with engine(policy={"budget": budget}) as llm:
        unlimited = complete(llm, prompts(text_ids), PARAMS)
    assert [c.token_ids for c in unlimited] == [c.token_ids for c in plain]
    for ours, theirs in zip(unlimited, plain, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=1e-5)
