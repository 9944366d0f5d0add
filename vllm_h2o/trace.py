"""Debugging record of what was kept, for tests and for looking at a policy at work.

Switched on by ``additional_config={"kv_policy": {..., "trace": True}}``; costs memory per step, so it is off
otherwise. Requests are told apart by the id of their first block, which no two running requests share while
prefix caching is off.
"""

from dataclasses import dataclass, field
from typing import Any

from vllm_h2o.compaction import Compaction
from vllm_h2o.layout import PagedLayer


@dataclass
class TraceLog:
    """Steps and compactions of one KV cache group on one worker.

    Attributes:
        steps: one ``(first_block_id, computed_tokens, new_tokens)`` per row and step.
        kept: one ``(first_block_id, computed_tokens_after, layer_name, positions)`` per row, layer and
            compaction; ``positions`` are nested lists ``[num_kv_heads][live tokens]``, unsorted.
    """

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    kept: list[tuple[int, int, str, list[list[int]]]] = field(default_factory=list)

    def add_steps(self, first_blocks: Any, computed: Any, new: Any) -> None:
        self.steps.extend(zip(first_blocks.tolist(), computed.tolist(), new.tolist(), strict=True))

    def add_compaction(
        self,
        layer_name: str,
        layer: PagedLayer,
        plan: Compaction,
        keys: tuple[tuple[int, int], ...],
    ) -> None:
        assert layer.positions is not None
        positions = layer.positions[plan.blocks].transpose(1, 2).flatten(2)
        for row, (first_block, computed) in enumerate(keys):
            kept = (plan.live & ~plan.freed)[row, 0]
            self.kept.append((first_block, computed, layer_name, positions[row][:, kept].tolist()))

    def take(self) -> dict[str, list[Any]]:
        """Hand over what was recorded and start anew."""
        taken = {"steps": list(self.steps), "kept": list(self.kept)}
        self.steps.clear()
        self.kept.clear()
        return taken
