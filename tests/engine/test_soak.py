"""Random requests for a while, everything checked after every step; `python -m tests.soak` runs for hours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.soak import VARIANTS, soak
from tests.tiny_models import save

SECONDS = 25


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama-gqa", tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("seed", "variant"), enumerate(VARIANTS))
def test_nothing_gets_lost(model: Path, seed: int, variant: dict[str, Any]) -> None:
    counts = soak(model, seed, SECONDS, variant)
    assert counts["requests"] > 20
    assert counts["preempted"] > 0, "the pool was too large to say anything"
    assert counts["evicted tokens"] > 1000
    assert counts["tokens from the prefix cache"] > 1000
