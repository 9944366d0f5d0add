"""Real vLLM engines for the tests, one at a time in the test's own process.

float32 and eager, so that outputs can be compared to 1e-4 and better; chunks of 256 tokens, so that
prompts are cut in several steps.
"""

from __future__ import annotations

import gc
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine runs in this process

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms.cpu import CpuPlatform

MODEL = os.environ.get("VLLM_H2O_MODEL", str(Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"))

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "max_model_len": 2048,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "seed": 0,
}


@contextmanager
def engine(model: str = MODEL, policy: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    """A vLLM engine with the given policy settings (None: plain vLLM), shut down on exit.

    Without a name it is h2o as published, beside one pinned block.
    """
    paper = {"name": "h2o", "preset": "paper", "pin_tokens": 32}
    additional_config = {}
    if policy is not None:
        additional_config["kv_policy"] = policy if "name" in policy else {**paper, **policy}
    llm = LLM(model, additional_config=additional_config, **{**DEFAULTS, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def scheduling(*, is_async: bool) -> Iterator[None]:
    """Engines that start inside schedule a step while the last one runs, or don't.

    vLLM switches that off on CPU, where it saves nothing. Scheduler and runner support it all the same.
    """
    original = CpuPlatform.check_and_update_config

    def keep(cls: type, vllm_config: Any) -> None:
        original.__func__(cls, vllm_config)  # type: ignore[attr-defined]
        vllm_config.scheduler_config.async_scheduling = is_async

    CpuPlatform.check_and_update_config = classmethod(keep)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original


@dataclass(frozen=True)
class Completion:
    """One greedy completion: token ids, the logprob of each generated token, and, where asked for, of each
    prompt token but the first."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    prompt_logprobs: list[float]

    @property
    def fed_ids(self) -> list[int]:
        """Everything the model computed: the last generated token never is."""
        return self.prompt_ids + self.token_ids[:-1]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **options}
    )


def complete(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """Greedy completions of token-id prompts, all submitted at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params if isinstance(params, SamplingParams) else list(params),
        use_tqdm=False,
    )
    return [
        Completion(
            list(output.prompt_token_ids or []),
            list(output.outputs[0].token_ids),
            [
                step[token].logprob
                for step, token in zip(
                    output.outputs[0].logprobs or [], output.outputs[0].token_ids, strict=True
                )
            ],
            output.outputs[0].text,
            [
                step[token].logprob
                for step, token in zip(
                    (output.prompt_logprobs or [])[1:], (output.prompt_token_ids or [])[1:], strict=False
                )
            ],
        )
        for output in outputs
    ]


@dataclass
class RequestTrace:
    """What one request went through on the worker.

    Attributes:
        step_sizes: new tokens of each of its steps.
        kept: per compaction, layer index -> int64 ``[num_kv_heads, live]`` positions, unsorted.
    """

    step_sizes: list[int] = field(default_factory=list)
    kept: list[dict[int, torch.Tensor]] = field(default_factory=list)


def take_traces(llm: LLM) -> list[RequestTrace]:
    """Traces of the requests since the last call, in the order in which they started.

    Needs ``trace=True`` in the policy and prefix caching off (requests are told apart by their first
    block). Serves one group of evicting layers.
    """
    (groups,) = llm.collective_rpc("take_kv_trace")
    (trace,) = groups
    requests: list[RequestTrace] = []
    current: dict[int, RequestTrace] = {}
    request_of_step: list[RequestTrace] = []
    for first_block, computed, new in trace["steps"]:
        if computed == 0:
            current[first_block] = RequestTrace()
            requests.append(current[first_block])
        request_of_step.append(current[first_block])
        request_of_step[-1].step_sizes.append(new)
    by_step: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for step, layer_name, positions, _ in trace["kept"]:
        by_step[step][int(re.search(r"\.(\d+)\.", layer_name)[1])] = torch.tensor(positions)
    for step in sorted(by_step):
        request_of_step[step].kept.append(by_step[step])
    return requests
