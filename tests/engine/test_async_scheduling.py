"""Asynchronous scheduling plans a step before the last one is settled; evictions must not notice.

vLLM switches it off on CPU, because it saves nothing there. The scheduler and the runner support it all the
same, so the test switches it back on.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.platforms.cpu import CpuPlatform

from tests.engines import engine
from tests.stepping import Stepper
from tests.tiny_models import random_prompt, save


def test_on_and_off_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 streams that evict at different steps, in chunks and in decode."""
    model = str(save("llama-gqa", tmp_path))
    original = CpuPlatform.check_and_update_config.__func__
    outputs: dict[bool, dict[str, list[int]]] = {}
    for is_async in (False, True):

        def keep_async(cls: type, vllm_config, is_async: bool = is_async) -> None:  # type: ignore[no-untyped-def]
            original(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = is_async

        monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_async))
        with engine(model, policy={"budget": 128}, skip_tokenizer_init=True, max_num_seqs=16) as llm:
            stepper = Stepper(llm)
            free = stepper.free_blocks
            most_in_flight = 0
            assert type(stepper.scheduler).__name__ == ("AsyncScheduler" if is_async else "Scheduler")

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
