"""Random requests on an engine whose pool is far too small for them, looked at after every step.

python -m tests.soak --minutes 60        # in the environment of the tests
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter, deque
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
        What happened how often; resident memory in MiB after a third of the time and at the end.

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
        prompts: dict[str, list[int]] = {}
        said: deque[list[int]] = deque(maxlen=40)  # texts that a request may begin with
        begins, resident_mib = time.monotonic(), []
        while time.monotonic() < begins + seconds or stepper.engine.has_unfinished_requests():
            has_time = time.monotonic() < begins + seconds
            if has_time and len(prompts) < 30 and draw.random() < 0.3:
                name = str(counts["requests"])
                prompts[name], params = _request(draw, counts, said)
                stepper.add(name, prompts[name], params)
                counts["requests"] += 1
            if prompts and draw.random() < _ABORTS:
                stepper.abort(draw.choice(sorted(prompts)))
                counts["aborted"] += 1
            stepper.step()
            counts["steps"] += 1
            check_integrity(stepper, counts["steps"])
            for name in sorted(stepper.finished):
                counts["ended"] += 1
                counts["tokens from the prefix cache"] += stepper.cached_tokens.get(name, 0)
                said.append(prompts.pop(name) + stepper.tokens[name])
                stepper.forget(name)
            if not resident_mib and time.monotonic() > begins + seconds / 3:
                resident_mib.append(_resident_mib())
        stepper.step()  # the worker hears of what ended last
        assert counts["ended"] == counts["requests"], "a request was lost"
        assert not prompts
        counts["evicted tokens"] = stepper.manager.usage.evicted_tokens
        stepper.llm.reset_prefix_cache()
        stepper.assert_idle(free)
        assert not stepper.manager.usage._requests
        assert not stepper.manager.requests
        assert not stepper.manager._whole
        counts["MiB at a third"], counts["MiB at the end"] = *resident_mib, _resident_mib()
    return counts


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _request(
    draw: random.Random, counts: Counter[str], said: deque[list[int]]
) -> tuple[list[int], SamplingParams]:
    """A prompt that may begin as others do, or go on from an earlier answer, and what may be asked for it."""
    start = random.Random(draw.randrange(_SYSTEM_PROMPTS))
    shared = [start.randrange(3, VOCAB_SIZE) for _ in range(96)] if draw.random() < 0.5 else []
    length = draw.choice([draw.randint(1, 60), draw.randint(60, 300), draw.randint(300, 1100)])
    if said and draw.random() < 0.4:
        text = draw.choice(said)
        shared = text[: draw.choice([len(text), draw.randint(1, len(text))])][: MAX_MODEL_LEN - 1700]
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
            counts = soak(model, seed, min(left, 15 * options.minutes), variant)
            print(f"{variant}: {dict(counts)}", flush=True)
            total += counts
            seed += 1
    print(f"in all: {dict(total)}", flush=True)


if __name__ == "__main__":
    main()
