"""Debugging record of what was kept, for tests and for looking at a policy at work.

Switched on by ``additional_config={"kv_policy": {..., "trace": True}}``; costs memory per step, so it is off
otherwise. Requests are told apart by the id of their first block, which no two running requests share while
prefix caching is off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from vllm_h2o.layout import PagedLayer


@dataclass
class TraceLog:
    """Steps and compactions of one KV cache group on one worker.

    Attributes:
        steps: one ``(first_block_id, computed_tokens, new_tokens)`` per row and step.
        kept: one ``(index into steps, layer_name, positions, scores)`` per row, layer and compaction;
            both are nested lists ``[num_kv_heads][live tokens]``, unsorted. Scores of pinned tokens, and of
            policies that keep none, mean nothing.
    """

    steps: list[tuple[int, int, int]] = field(default_factory=list)
    kept: list[tuple[int, str, list[list[int]], list[list[float]]]] = field(default_factory=list)

    def add_steps(self, first_blocks: Any, computed: Any, new: Any) -> int:
        """Record one step of every row; returns the index of the first row's entry."""
        first = len(self.steps)
        self.steps.extend(zip(first_blocks.tolist(), computed.tolist(), new.tolist(), strict=True))
        return first

    def add_compaction(
        self,
        layer_name: str,
        layer: PagedLayer,
        kept_blocks: Sequence[npt.NDArray[Any]],
        num_kept_tokens: Sequence[int],
        step_indices: Sequence[int],
    ) -> None:
        """Record what is left of each compacted row, once its survivors have moved.

        Args:
            kept_blocks: per row the ids of the blocks it keeps, in order.
            num_kept_tokens: per row the tokens in them.
        """
        assert layer.positions is not None, "tracing tracks positions"
        for blocks, count, step_index in zip(kept_blocks, num_kept_tokens, step_indices, strict=True):
            ids = torch.from_numpy(blocks).long()
            positions, scores = (
                view[ids].transpose(0, 1).flatten(1)[:, :count].tolist()
                for view in (layer.positions, layer.scores)
            )
            self.kept.append((step_index, layer_name, positions, scores))

    def take(self) -> dict[str, list[Any]]:
        """Hand over what was recorded and start anew."""
        taken: dict[str, list[Any]] = {"steps": list(self.steps), "kept": list(self.kept)}
        self.steps.clear()
        self.kept.clear()
        return taken
