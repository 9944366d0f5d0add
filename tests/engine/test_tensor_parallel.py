"""Two tensor-parallel ranks on CPU evict as one does, without a word between them about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import DEFAULTS
from tests.tiny_models import random_prompt, save

# Ranks are processes of their own, which need the engine in a process of its own, too.
_SCRIPT = """
import json, sys

def main():
    from vllm import LLM, SamplingParams
    options, prompts, result = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
    llm = LLM(**options)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False)
    # One after the other: how requests that arrive together are cut in chunks depends on timing.
    outputs = [llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in prompts]
    traces = llm.collective_rpc("take_kv_trace")
    with open(result, "w") as file:
        json.dump({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "traces": traces}, file)

if __name__ == "__main__":
    main()
"""


def run(model: Path, tensor_parallel_size: int, prompts: list[list[int]], directory: Path) -> dict[str, Any]:
    script, result = directory / "run.py", directory / f"tp{tensor_parallel_size}.json"
    script.write_text(_SCRIPT)
    options = {
        **DEFAULTS,
        "model": str(model),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "tensor_parallel_size": tensor_parallel_size,
        "additional_config": {"kv_policy": {"name": "h2o", "budget": 128, "trace": True}},
    }
    environment = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join("01"[:tensor_parallel_size]),
    }
    process = subprocess.run(
        [sys.executable, str(script), json.dumps(options), json.dumps(prompts), str(result)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    model = save("llama-gqa", tmp_path)
    prompts = [random_prompt(length, seed=length) for length in (30, 150, 500)]
    one, two = (run(model, size, prompts, tmp_path) for size in (1, 2))
    assert two["tokens"] == one["tokens"]
    ((single,),), (first_rank, second_rank) = one["traces"], two["traces"]
    assert single["kept"], "nothing was evicted, so nothing was tested"
    # Each rank holds one of the two KV heads, and keeps for it what the single worker keeps.
    for whole, *halves in zip(single["kept"], first_rank[0]["kept"], second_rank[0]["kept"], strict=True):
        step, layer_name, positions, _ = whole
        assert [half[:2] for half in halves] == [[step, layer_name]] * 2
        assert [sorted(head) for half in halves for head in half[2]] == [sorted(h) for h in positions]
