"""Transformers' ``generate`` on one static batch after another, for the peers `hf` and `kvpress`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StoppingCriteria

from peer_protocol import Phases, check_counts
from peer_workload import WARM_UP_TOKENS, Task, prompts, warm_up_prompt


class _FirstToken(StoppingCriteria):
    """Stops nothing: ``generate`` asks it after every token, and it notes the time of the first."""

    def __init__(self) -> None:
        self.at: float | None = None  # seconds of time.perf_counter

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.at is None:
            self.at = time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def load(task: Task, attention: str) -> Any:
    """The model in bfloat16, which never ends a text by itself."""
    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=torch.bfloat16, attn_implementation=attention, local_files_only=True
    )
    model.generation_config.eos_token_id = None
    return model.eval()


def run(
    task: Task, model: Any, around: Callable[[], AbstractContextManager[Any]]
) -> tuple[list[Phases], int]:
    """Run all requests of the task in batches of its variant's size, after a short warm-up.

    Args:
        around: makes what has to be entered around each ``generate``.

    Returns:
        Phases per batch, and the KV tokens that a request of the last batch ended with.
    """
    with around():
        _generate(model, [warm_up_prompt(task)], WARM_UP_TOKENS[1], DynamicCache())
    batch, wanted = task.variant.batch, prompts(task)
    phases, kept = [], 0
    for start in range(0, len(wanted), batch):
        cache = DynamicCache()
        with around():
            phases.append(_generate(model, wanted[start : start + batch], task.workload.output_tokens, cache))
        kept = int(cache.get_seq_length())
    return phases, kept


def _generate(model: Any, batch: list[list[int]], output_tokens: int, cache: DynamicCache) -> Phases:
    ids = torch.tensor(batch)
    first = _FirstToken()
    started = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_tokens,
            do_sample=False,
            past_key_values=cache,
            stopping_criteria=[first],
        )
    total_s = time.perf_counter() - started
    check_counts([len(row) - ids.shape[1] for row in output], output_tokens)
    assert first.at is not None
    return Phases(first.at - started, total_s, len(batch), output_tokens * len(batch))
