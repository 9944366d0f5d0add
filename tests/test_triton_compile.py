"""The Triton kernels as the launchers call them, compiled for NVIDIA GPUs without one.

What the kernels compute is tested in Triton's interpreter (`pytest -m triton` with TRITON_INTERPRET=1).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import INTERPRETED, Pages, Shape, run_drops, run_plan, run_scores, triton_kernels
from vllm_h2o.config import RANKS, RankBy
from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.layout import PagedLayer

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels aren't compiled")

TARGETS = {"Ampere": 80, "Hopper": 90, "Blackwell": 100}
MOST_SHARED_BYTES = 99 << 10
"""What one program may use on every one of them (and on consumer cards of compute capability 8.6 and 8.9)."""

MOST_SPILLED_BYTES = 16
"""Of a thread's registers; the compiler for Blackwell keeps a word or two in memory."""


@dataclass(frozen=True)
class Launch:
    """One launch, as the compiler sees it."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]

    def compile(self, capability: int) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32))


@dataclass
class Launches:
    """Takes the place of the launches: keeps each kernel's first one in every form."""

    seen: dict[str, Launch] = field(default_factory=dict)

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert all(count >= 1 for count in grid), f"{kernel.__name__} is launched for nothing: {grid}"
        bound = kernel.signature.bind(*args, **kwargs)
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = bound.arguments[parameter.name]
            # As Triton's own launcher does: ones are constants, multiples of 16 are known to be.
            special = not parameter.do_not_specialize
            if parameter.is_constexpr or (special and isinstance(value, int) and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            signature[parameter.name] = type_of(value)
            divisible = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if special and divisible % 16 == 0:
                attributes[i,] = [["tt.divisibility", 16]]
        launch = Launch(kernel, signature, constants, attributes)
        self.seen[f"{kernel.__name__} {sorted(map(str, constants.items()))}"] = launch


def type_of(value: Any) -> str:
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    names = {
        torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
        torch.int32: "i32", torch.int8: "i8",
    }  # fmt: skip
    return f"*{names[value.dtype]}"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda kernel, *a, **k: found(kernel, *a, **k))
    return found


def layer(dtype: torch.dtype, head_size: int) -> Pages:
    shape = Shape(
        num_blocks=40, num_kv_heads=2, block_size=16, head_size=head_size, dtype=dtype, positions=True
    )
    pages = Pages(shape, seed=0)
    pages.layer = PagedLayer.from_gpu_cache(pages.cache, positions=True)
    return pages


def score(dtype: torch.dtype, head_size: int, *, from_ring: bool, softcap: float = 0.0) -> None:
    pages = layer(dtype, head_size)
    rows = [pages.add_row(96), pages.add_row(200)]
    query = torch.empty(64, 8, head_size, dtype=dtype)
    sinks = torch.zeros(8) if softcap else None
    run_scores(
        pages, query, query, rows, [0, 16], [16, 16], AttentionShape(0.1, softcap, sinks),
        from_ring=from_ring, pinned_blocks=1, half_life=None, make=triton_kernels,
    )  # fmt: skip


def drop(
    rank_by: RankBy, *, dtype: torch.dtype = torch.bfloat16, pool: int = 1, by_block: bool = False
) -> None:
    pages = layer(dtype, 128)
    rows = [pages.add_row(96), pages.add_row(200)]
    run_drops(
        pages, rows, [16, 32], pinned_tokens=16, recent_tokens=16, score_pool=pool, by_block=by_block,
        rank_by=rank_by, total_weights=[1.0] * 300, make=triton_kernels,
    )  # fmt: skip


def start_and_append() -> None:
    import numpy as np

    from vllm_h2o.step_plan import StepPlan

    for name, rank_by in (("h2o", "sum"), ("random", "random")):
        pages = layer(torch.bfloat16, 128)
        query = torch.empty(64, 8, 128, dtype=torch.bfloat16)
        plan = StepPlan(
            append_tokens=np.array([1, 3]),
            append_slots=np.array([5, 9]),
            started_blocks=np.array([3, 4]),
            started_positions=np.arange(32, dtype=np.int32).reshape(2, 16),
        )
        run_plan(
            pages, plan, query.clone(), query, AttentionShape(1.0), pinned_tokens=16, name=name,
            rank_by=rank_by, make=triton_kernels,
        )  # fmt: skip


CASES: dict[str, Callable[[], None]] = {
    "score bf16 128": lambda: score(torch.bfloat16, 128, from_ring=False),
    "score a ring bf16 64": lambda: score(torch.bfloat16, 64, from_ring=True),
    "score fp16 256": lambda: score(torch.float16, 256, from_ring=False),
    "score fp32 80": lambda: score(torch.float32, 80, from_ring=True),
    "score with softcap and sinks": lambda: score(torch.bfloat16, 128, from_ring=False, softcap=30.0),
    **{f"drop by {rank_by}": lambda rank_by=rank_by: drop(rank_by) for rank_by in RANKS},
    "drop with a pool": lambda: drop("value", pool=15),
    "drop blocks": lambda: drop("sum", by_block=True, pool=15),
    "drop fp32": lambda: drop("value", dtype=torch.float32),
    "start blocks, keep queries": start_and_append,
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_compiles(case: str, target: str, launches: Launches, tmp_path: Path) -> None:
    CASES[case]()
    assert launches.seen
    for name, launch in launches.seen.items():
        compiled = launch.compile(TARGETS[target])
        assert compiled.metadata.shared <= MOST_SHARED_BYTES, name
        assert spilled_bytes(compiled.asm["cubin"], tmp_path / "kernel.cubin") <= MOST_SPILLED_BYTES, name


def spilled_bytes(cubin: bytes, path: Path) -> int:
    """Local memory of a kernel: what didn't fit its registers."""
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    output = subprocess.run(
        [str(tool), "--dump-resource-usage", str(path)], check=True, capture_output=True, text=True
    ).stdout
    (stack,) = re.findall(r"STACK:(\d+)", output)
    (local,) = re.findall(r"LOCAL:(\d+)", output)
    return int(stack) + int(local)
