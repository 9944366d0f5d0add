"""Plain vLLM, offline; with a policy also the plugin (see peer_h2o.py)."""

from __future__ import annotations

import os
from typing import Any

import peer_protocol
from peer_protocol import Phases, Watch
from peer_workload import (
    BLOCK_TOKENS,
    MAX_BATCHED_TOKENS,
    WARM_UP_TOKENS,
    Task,
    prompts,
    warm_up_prompt,
)


def measure(task: Task, policy: dict[str, Any] | None = None) -> tuple[list[Phases], dict[str, Any]]:
    """Run the task in this process, under a KV policy if there is one."""
    # The engine in this process, so that its memory is counted and its steps can be watched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if policy is None:
        os.environ["VLLM_PLUGINS"] = ""  # not even installed plugins that do nothing
    import torch
    from vllm import LLM

    engine = LLM(
        task.model,
        dtype="bfloat16",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        # One more: vLLM gives the first block to nobody.
        num_gpu_blocks_override=task.workload.pools[task.variant.pool] // BLOCK_TOKENS + 1,
        # The line above says how much is taken. Without this one vLLM asks for most of the machine's memory
        # to be free.
        kv_cache_memory_bytes=4 * 1024**3,
        max_model_len=task.workload.max_model_len,
        max_num_seqs=task.workload.requests,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        enable_prefix_caching=False,
        additional_config={} if policy is None else {"kv_policy": policy},
        seed=0,
    ).llm_engine
    _run(engine, [warm_up_prompt(task)], WARM_UP_TOKENS[1])
    return [_run(engine, prompts(task), task.workload.output_tokens)], {"threads": torch.get_num_threads()}


def _run(engine: Any, wanted: list[list[int]], output_tokens: int) -> Phases:
    """What ``LLM.generate`` does, with the clock read after every step."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    watch = Watch(len(wanted))
    for i, ids in enumerate(wanted):
        engine.add_request(str(i), {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            watch.counts[int(output.request_id)] = len(output.outputs[0].token_ids)
        watch.look()
    return watch.stop(output_tokens)


if __name__ == "__main__":
    peer_protocol.main(measure, ["vllm", "torch"])
