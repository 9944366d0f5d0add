"""Nothing of ours grows while requests go on: 2,000 steps far past the budget."""

from __future__ import annotations

import resource
import tracemalloc
from pathlib import Path

import pytest

import vllm_h2o
from tests.engines import engine
from tests.stepping import Stepper
from tests.tiny_models import MAX_POSITIONS, random_prompt, save

PACKAGE = Path(vllm_h2o.__file__).parent
NUM_REQUESTS, PROMPT_TOKENS, WARM_UP_STEPS, STEPS = 4, 40, 400, 2000
MOST_PYTHON_BYTES = 16 << 10
MOST_RESIDENT_BYTES = 8 << 20  # vLLM's own lists of tokens are among it


def python_bytes() -> int:
    """What lines of the package have allocated and not freed."""
    ours = [tracemalloc.Filter(True, str(PACKAGE / "*"))]
    statistics = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
    return sum(statistic.size for statistic in statistics)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("settings", [{}, {"name": "h2o"}], ids=["paper", "defaults"])
def test_memory_stays_while_tokens_are_dropped(settings: dict[str, str], tmp_path: Path) -> None:
    model = str(save("llama-gqa", tmp_path))
    options = {"max_model_len": MAX_POSITIONS, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True}
    with engine(model, policy={**settings, "budget": 160}, **options) as llm:
        stepper = Stepper(llm)
        for i in range(NUM_REQUESTS):
            stepper.add(str(i), random_prompt(PROMPT_TOKENS, seed=i), STEPS)
        for _ in range(WARM_UP_STEPS):
            stepper.step()
        tracemalloc.start()
        try:
            for _ in range(WARM_UP_STEPS):  # so that what is replaced at times was traced once
                stepper.step()
            before = python_bytes(), resident_bytes()
            steps = 0
            while stepper.engine.has_unfinished_requests():
                stepper.step()
                steps += 1
                if steps == STEPS - 2 * WARM_UP_STEPS - 10:  # all requests are still running
                    after = python_bytes(), resident_bytes()
        finally:
            tracemalloc.stop()
    assert all(len(tokens) == STEPS for tokens in stepper.tokens.values())
    assert after[0] - before[0] <= MOST_PYTHON_BYTES
    assert after[1] - before[1] <= MOST_RESIDENT_BYTES
