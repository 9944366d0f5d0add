"""Hugging Face Transformers with a full cache: on a CPU the same as the paper's baseline, Accelerate."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import peer_protocol
import static_batches
from peer_protocol import Phases
from peer_workload import Task


def measure(task: Task) -> tuple[list[Phases], dict[str, Any]]:
    """Run the task; its phases, and the KV tokens that a request ended with."""
    model = static_batches.load(task, attention="sdpa")
    phases, kept = static_batches.run(task, model, nullcontext)
    return phases, {"kv_tokens_per_request": kept}


if __name__ == "__main__":
    peer_protocol.main(measure, ["transformers", "torch"])
