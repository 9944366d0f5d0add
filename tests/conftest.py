"""Settings that must hold before vLLM is imported, and fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

# No hub, no usage reports, no address but loopback.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# The machine's memory is shared with the test process itself.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")


# Test processes side by side get a core each (pytest-xdist names them gw0, gw1, ...): OpenMP threads that
# wait for each other's cores are many times slower than one thread.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    _cores = sorted(os.sched_getaffinity(0))
    _core = _cores[int(_worker.removeprefix("gw")) % len(_cores)]
    os.sched_setaffinity(0, {_core})
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(_core)}

import hypothesis
import pytest

# Examples take a while on a busy machine; a hanging test has its own timeout.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def text_ids() -> list[int]:
    """About 2,400 tokens of English text, as SmolLM2 sees them."""
    from transformers import AutoTokenizer

    from tests.engines import MODEL

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids: list[int] = tokenizer((REPOSITORY / "LICENSE").read_text())["input_ids"]
    return ids


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, then engines, then servers.

    The order matters for one thing: vLLM decorates some Hugging Face classes in place when it serves a model
    with them, and the oracle's own tests need those classes as they were.
    """
    folders = {"tests": 0, "engine": 1, "e2e": 2}
    items.sort(key=lambda item: folders.get(item.path.parent.name, 0))
