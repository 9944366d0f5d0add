"""Which kernels run, what happens without a compiler, and that the native ones are deterministic."""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paged import Pages, Row, Shape, run_scores
from vllm_h2o import kernels
from vllm_h2o.config import KernelChoice, KVPolicyConfig
from vllm_h2o.errors import ConfigError
from vllm_h2o.kernels.base import AttentionShape
from vllm_h2o.kernels.native import build, library


def config(choice: KernelChoice) -> KVPolicyConfig:
    return KVPolicyConfig(
        name="h2o",
        block_size=32,
        budget_tokens=512,
        recent_tokens=256,
        pinned_blocks=1,
        granularity="token",
        score_half_life_tokens=None,
        score_pool=1,
        max_model_len=4096,
        max_in_flight_tokens=512,
        kernels=choice,
    )


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing compiled so far, as on a new machine."""
    monkeypatch.setenv("VLLM_H2O_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache"
    library.load.cache_clear()


@pytest.mark.parametrize(("choice", "name"), [("auto", "native"), ("native", "native"), ("torch", "torch")])
def test_choice(choice: KernelChoice, name: str) -> None:
    assert kernels.create(config(choice)).name == name


@pytest.mark.parametrize(("choice", "device"), [("triton", "cpu"), ("triton", "cuda"), ("auto", "cuda")])
def test_choice_on_a_gpu(choice: KernelChoice, device: str) -> None:
    pytest.importorskip("triton")
    assert kernels.create(config(choice), torch.device(device)).name == "triton"


def test_without_a_compiler_auto_says_so_and_works(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert kernels.create(config("auto")).name == "torch"
    (record,) = caplog.records
    assert "no-such-compiler is not there" in record.getMessage()
    assert "Install a C++ compiler" in record.getMessage()


def test_without_a_compiler_native_is_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"kernels='native'.*no-such-compiler.*Install a C\+\+ compiler"):
        kernels.create(config("native"))


def test_a_compiler_that_fails_is_quoted(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\ncase "$*" in *--version*) exit 0;; esac\necho out of paper >&2\nexit 3\n')
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(build.BuildError, match="out of paper"):
        build.build()
    assert list(empty_cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_H2O_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(build.BuildError, match="VLLM_H2O_CACHE"):
        build.build()


def test_compiled_once(empty_cache: Path) -> None:
    first = build.build()
    assert [first] == list(empty_cache.iterdir())
    made = first.stat().st_mtime_ns
    assert build.build() == first
    assert first.stat().st_mtime_ns == made


# --- the same to the bit, whatever else goes on ---------------------------------------------------


def scores_of(lengths: list[tuple[int, int]], chosen: int, threads: int) -> torch.Tensor:
    """Scores of one row when these (live, new) rows are scored together by so many threads."""
    shape = Shape(num_blocks=200, num_kv_heads=2, block_size=16, head_size=16, dtype=torch.bfloat16)
    pages = Pages(shape, seed=3)
    rows = [pages.add_row(live) for live, _ in lengths]
    firsts = [sum(new for _, new in lengths[:i]) for i in range(len(lengths))]
    query = pages.random(sum(new for _, new in lengths), 6, 16)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        score(pages, query, rows, firsts, [new for _, new in lengths])
        together = pages.get(pages.layer.scores, rows[chosen], 1).clone()
        for row in rows:
            pages.put(pages.layer.scores, row, 1, torch.zeros(row.num_live))
        score(pages, query, rows[chosen : chosen + 1], firsts[chosen : chosen + 1], [lengths[chosen][1]])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(pages.get(pages.layer.scores, rows[chosen], 1), together)
    return together


def score(pages: Pages, query: torch.Tensor, rows: list[Row], firsts: list[int], counts: list[int]) -> None:
    run_scores(
        pages,
        query[:0],
        query,
        rows,
        firsts,
        counts,
        AttentionShape(0.25),
        from_ring=False,
        pinned_blocks=1,
        half_life=None,
    )


def test_scores_depend_neither_on_the_batch_nor_on_threads() -> None:
    lengths = [(700, 300), (40, 16), (333, 333), (500, 1)]
    for chosen in range(len(lengths)):
        one, two, five = (scores_of(lengths, chosen, threads) for threads in (1, 2, 5))
        assert torch.isfinite(one).all()
        assert one.max() > 0
        assert torch.equal(one, two)
        assert torch.equal(one, five)
