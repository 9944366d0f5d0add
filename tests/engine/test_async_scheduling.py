"""Asynchronous scheduling plans a step before the last one is settled; evictions must not notice."""

from __future__ import annotations

from pathlib import Path

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tests.engines import engine, scheduling
from tests.stepping import Stepper
from tests.tiny_models import random_prompt, save


def test_on_and_off_agree(tmp_path: Path) -> None:
    """16 streams that evict at different steps, in chunks and in decode."""
    model = str(save("llama-gqa", tmp_path))
    outputs: dict[bool, dict[str, list[int]]] = {}
    for is_async in (False, True):
        with (
            scheduling(is_async=is_async),
            engine(model, policy={"budget": 128}, skip_tokenizer_init=True, max_num_seqs=16) as llm,
        ):
            stepper = Stepper(llm)
            free = stepper.free_blocks
            most_in_flight = 0
            assert isinstance(stepper.scheduler, AsyncScheduler) == is_async

            def watch(stepper: Stepper = stepper) -> None:
                nonlocal most_in_flight
                most_in_flight = max(
                    [most_in_flight, *(request.num_in_flight_tokens for request in stepper.requests())]
                )

            for i in range(16):
                stepper.add(str(i), random_prompt(20 + 31 * i, seed=i), 100 + 7 * i)
            outputs[is_async] = dict(stepper.run(watch))
            assert (most_in_flight > 0) == is_async, "steps must overlap exactly when asynchronous"
            stepper.assert_idle(free)
    assert outputs[True] == outputs[False]
