"""Nothing of ours grows while requests go on: 2,000 steps far past the budget."""

from __future__ import annotations

import gc
import resource
import tracemalloc
from pathlib import Path

from vllm import SamplingParams

import vllm_h2o
from tests.engines import engine
from tests.stepping import Stepper
from tests.tiny_models import MAX_POSITIONS, random_prompt, save

PACKAGE = Path(vllm_h2o.__file__).parent
NUM_REQUESTS, PROMPT_TOKENS, STEPS = 4, 40, 2000
MOST_PYTHON_BYTES = 4 << 10  # in 200 steps
MOST_RESIDENT_BYTES = 2 << 20  # in 1,200 steps; vLLM's own lists of tokens are among it


def python_bytes() -> int:
    """What lines of the package have allocated and not freed."""
    gc.collect()  # empties Python's free lists too, whose objects still count as their first line's
    ours = [tracemalloc.Filter(True, str(PACKAGE / "*"))]
    statistics = tracemalloc.take_snapshot().filter_traces(ours).statistics("filename")
    return sum(statistic.size for statistic in statistics)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_memory_stays_while_tokens_are_dropped(tmp_path: Path) -> None:
    model = str(save("llama-gqa", tmp_path))
    options = {"max_model_len": MAX_POSITIONS, "num_gpu_blocks_override": 40, "skip_tokenizer_init": True}
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True, detokenize=False)
    with engine(model, policy={"name": "h2o", "budget": 160}, **options) as llm:
        stepper = Stepper(llm)

        def steps(count: int) -> None:
            for _ in range(count):
                stepper.step()

        for i in range(NUM_REQUESTS):
            stepper.add(str(i), random_prompt(PROMPT_TOKENS, seed=i), params)
        steps(400)
        resident = resident_bytes()
        steps(1200)
        resident = resident_bytes() - resident
        # Tracing makes steps several times slower, and takes memory itself.
        tracemalloc.start()
        try:
            steps(100)  # so that what is replaced at times was traced once
            traced = python_bytes()
            steps(200)
            traced = python_bytes() - traced
        finally:
            tracemalloc.stop()
        stepper.run()
    assert all(len(tokens) == STEPS for tokens in stepper.tokens.values())
    assert resident <= MOST_RESIDENT_BYTES
    assert traced <= MOST_PYTHON_BYTES
