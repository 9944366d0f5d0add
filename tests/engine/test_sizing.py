"""The worked example of docs/operations.md is what vLLM makes of its flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines import engine

DOC = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
LAYERS, KV_HEADS, QUERY_HEADS, HEAD_SIZE, ELEMENT_BYTES, BLOCK = 30, 3, 9, 64, 2, 32
BUDGET, CHUNK, NUM_SEQS, CACHE_BYTES = 1024, 512, 32, 2**30


def tokens_in_doc(row: str) -> list[int]:
    """Numbers with thousands separators in a row of the example's table."""
    (line,) = re.findall(rf"^\| {row} \|(.*)$", DOC, flags=re.MULTILINE)
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?(?<!,)", line)]


@pytest.mark.parametrize(("policy", "column"), [(None, 0), ({"name": "h2o", "budget": BUDGET}, 1)])
def test_the_pool_holds_what_the_formula_says(
    policy: dict[str, object] | None, column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # it counts more than what follows
    options = {"max_model_len": 4096, "max_num_seqs": NUM_SEQS, "max_num_batched_tokens": CHUNK}
    with engine(
        policy=policy,
        dtype="bfloat16",
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=CACHE_BYTES,
        **options,
    ) as llm:
        found = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks * BLOCK
    per_token = 2 * LAYERS * KV_HEADS * HEAD_SIZE * ELEMENT_BYTES
    taken = 0.0
    if policy is not None:
        per_token += 8 * LAYERS * KV_HEADS
        queries = (NUM_SEQS + 16) * BLOCK * LAYERS * QUERY_HEADS * HEAD_SIZE * ELEMENT_BYTES
        # Of one thread: what test runs with two use more is far below the tolerance.
        taken = queries + 4 * 2**22 + 4 * (BUDGET + CHUNK) * (HEAD_SIZE + 16)
    expected = (CACHE_BYTES - taken) / per_token
    assert found == pytest.approx(expected, rel=2e-3)
    assert tokens_in_doc("tokens in the pool")[column] == pytest.approx(expected, rel=1e-3)
