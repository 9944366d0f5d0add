"""vLLM with this plugin, and otherwise as in peer_vllm.py."""

from __future__ import annotations

from typing import Any

import peer_protocol
import peer_vllm
from peer_protocol import Phases
from peer_workload import Task


def measure(task: Task) -> tuple[list[Phases], dict[str, Any]]:
    """Run the task under H2O with the workload's budget, and else the plugin's defaults."""
    return peer_vllm.measure(task, {"name": "h2o", "budget": task.workload.budget_tokens})


if __name__ == "__main__":
    peer_protocol.main(measure, ["vllm-h2o", "vllm", "torch"])
