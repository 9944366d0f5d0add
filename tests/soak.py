"""Random requests on an engine whose pool is far too small for them, looked at after every step.

python -m tests.soak --minutes 60        # in the environment of the tests
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engines import engine, scheduling
from tests.integrity import check_integrity
from tests.stepping import Stepper
from tests.tiny_models import VOCAB_SIZE, save

BLOCKS, MAX_MODEL_LEN = 72, 2048
SERVER: dict[str, Any] = {"name": "h2o", "budget": 256, "pin_tokens": 64}
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"prompt_budget": 640},
    {"granularity": "block", "score_pool": 1},
    {"preset": "paper", "recent": 0.2, "score_rank": "mean"},
)
_SYSTEM_PROMPTS = 3
_ABORTS = 0.01
"""Share of the steps after which one request is aborted."""


def soak(model: Path, seed: int, seconds: float, variant: dict[str, Any]) -> Counter[str]:
    """Serve random requests for a while, and then all that is left.

    Returns:
        What happened how often.

    Raises:
        AssertionError: something doesn't agree (``tests.integrity``), or a request got lost.
    """
    draw = random.Random(seed)
    counts: Counter[str] = Counter()
    options: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN, "num_gpu_blocks_override": BLOCKS, "max_num_seqs": 12,
        "enable_prefix_caching": True, "skip_tokenizer_init": True,
    }  # fmt: skip
    with (
        scheduling(is_async=seed % 2 == 1),
        engine(str(model), policy={**SERVER, **variant}, **options) as llm,
    ):
        stepper = Stepper(llm)
        free = stepper.free_blocks
        preempt = stepper.scheduler._preempt_request

        def count_preemption(*args: Any, **kwargs: Any) -> Any:
            counts["preempted"] += 1
            return preempt(*args, **kwargs)

        stepper.scheduler._preempt_request = count_preemption
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or stepper.engine.has_unfinished_requests():
            waiting = len(stepper.scheduler.waiting) + len(stepper.scheduler.running)
            if time.monotonic() < ends and waiting < 30 and draw.random() < 0.3:
                name = str(counts["requests"])
                stepper.add(name, *_request(draw, counts))
                counts["requests"] += 1
            if draw.random() < _ABORTS and (open_ := sorted(set(stepper.tokens) - stepper.finished)):
                stepper.abort(draw.choice(open_))
                counts["aborted"] += 1
            stepper.step()
            counts["steps"] += 1
            check_integrity(stepper, counts["steps"])
        stepper.step()  # the worker hears of what ended last
        assert stepper.finished == set(stepper.tokens), "a request was lost"
        counts["evicted tokens"] = stepper.manager.usage.evicted_tokens
        stepper.llm.reset_prefix_cache()
        stepper.assert_idle(free)
        assert not stepper.manager.usage._requests
        assert not stepper.manager.requests
    return counts


def _request(draw: random.Random, counts: Counter[str]) -> tuple[list[int], SamplingParams]:
    """A prompt that may begin as others do, and what may be asked for it."""
    start = random.Random(draw.randrange(_SYSTEM_PROMPTS))
    shared = [start.randrange(3, VOCAB_SIZE) for _ in range(96)] if draw.random() < 0.5 else []
    length = draw.choice([draw.randint(1, 60), draw.randint(60, 300), draw.randint(300, 1100)])
    prompt = shared + [draw.randrange(3, VOCAB_SIZE) for _ in range(length)]
    max_tokens = draw.choice([1, draw.randint(2, 40), draw.randint(40, 500)])
    asked = draw.choice(
        [
            None, None, {"kv_budget": draw.randint(150, 256)}, {"kv_pin_tokens": draw.randint(64, 160)},
            {"kv_budget": 200, "kv_report": 1},
        ]
    )  # fmt: skip
    if draw.random() < 0.1 and len(prompt) + max_tokens < (BLOCKS - 1) * 32:
        asked = {"kv_policy": "none"}
    counts[f"asked for {next(iter(asked)) if asked else 'nothing'}"] += 1
    return prompt, SamplingParams(
        temperature=draw.choice([0.0, 1.0]), max_tokens=max_tokens, ignore_eos=True, detokenize=False,
        extra_args=asked, output_kind=RequestOutputKind.CUMULATIVE,
    )  # fmt: skip


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    ends, total = time.monotonic() + 60 * options.minutes, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        model = save("llama-gqa", Path(folder))
        seed = options.seed
        while (left := ends - time.monotonic()) > 0:
            variant = VARIANTS[seed % len(VARIANTS)]
            total += soak(model, seed, min(left, 300), variant)
            print(f"{variant}: {dict(total)}", flush=True)
            seed += 1


if __name__ == "__main__":
    main()
