"""Debugging record of what was kept, for tests and for looking at a policy at work.

Switched on by ``additional_config={"kv_policy": {..., "trace": True}}``; costs memory per step, so it is off
otherwise. Requests are told apart by the id of their first block, which no two running requests share while
prefix caching is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_h2o.compaction import Compaction
from vllm_h2o.layout import PagedLayer


@dataclass
class TraceLog:
    """Steps and compactions of one KV cache group on one worker.

    Attributes:
        steps: one ``(first_block_id, computed_tokens, new_tokens)`` per row and step.
        kept: one ``(index into steps, layer_name, positions)`` per row, layer and compaction;
            ``positions`` are nested lists ``[num_kv_heads][live tokens]``, unsorted.
    """

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    kept: list[tuple[int, str, list[list[int]]]] = field(default_factory=list)

    def add_steps(self, first_blocks: Any, computed: Any, new: Any) -> int:
        """Record one step of every row; returns the index of the first row's entry."""
        first = len(self.steps)
        self.steps.extend(zip(first_blocks.tolist(), computed.tolist(), new.tolist(), strict=True))
        return first

    def add_compaction(
        self, layer_name: str, layer: PagedLayer, plan: Compaction, step_indices: Sequence[int]
    ) -> None:
        """Record what is left of each of the compaction's rows, once its survivors have moved."""
        assert layer.positions is not None, "tracing tracks positions"
        positions = layer.positions[plan.blocks].transpose(1, 2).flatten(2)
        for row, step_index in enumerate(step_indices):
            kept = (plan.live & ~plan.freed)[row, 0]
            self.kept.append((step_index, layer_name, positions[row][:, kept].tolist()))

    def take(self) -> dict[str, list[Any]]:
        """Hand over what was recorded and start anew."""
        taken: dict[str, list[Any]] = {"steps": list(self.steps), "kept": list(self.kept)}
        self.steps.clear()
        self.kept.clear()
        return taken
