"""The debugging record, on a cache whose compaction is known."""

from __future__ import annotations

import numpy as np
import torch

from paged import Pages, Shape, compaction, padded_blocks
from vllm_h2o.kernels.plain.compaction import compact
from vllm_h2o.step_plan import DropRows
from vllm_h2o.trace import TraceLog


def test_kept_positions_are_those_left_after_the_move() -> None:
    pages = Pages(Shape(positions=True), seed=0)
    rows = [pages.add_row(16), pages.add_row(12)]
    # Head 0 drops the oldest that it may, head 1 the newest.
    for row in rows:
        for head, scores in enumerate((torch.arange(row.num_live), -torch.arange(row.num_live))):
            pages.put(pages.layer.scores, row, head, scores)
    plan = compaction(rows, [8, 4], 4, pinned_tokens=4, recent_tokens=3)
    compact(pages.layer, plan)
    log = TraceLog()
    assert log.add_steps(np.array([7, 8, 9]), np.array([15, 3, 11]), np.array([1, 1, 1])) == 0
    drops = DropRows(
        num_live=np.array([16, 12]),
        num_dropped=np.array([8, 4]),
        live_table=padded_blocks(rows).int().numpy(),
        num_tokens=np.array([16, 12]),
        pinned_tokens=np.array([4, 4]),
    )
    log.add_compaction("layer.3", pages.layer, drops.kept_blocks(4), [8, 8], (0, 2))
    assert log.steps == [(7, 15, 1), (8, 3, 1), (9, 11, 1)]
    kept = [(step, name, [sorted(head) for head in heads]) for step, name, heads, _ in log.kept]
    pinned = [0, 1, 2, 3]
    assert kept == [
        (0, "layer.3", [[*pinned, 12, 13, 14, 15], [*pinned, 4, 13, 14, 15]]),
        (2, "layer.3", [[*pinned, 8, 9, 10, 11], [*pinned, 4, 9, 10, 11]]),
    ]
    # Scores went along with their tokens.
    for _, _, (first, second), (first_scores, second_scores) in log.kept:
        assert first_scores == [float(position) for position in first]
        assert second_scores == [-float(position) for position in second]


def test_taking_starts_anew_and_leaves_what_was_taken_alone() -> None:
    log = TraceLog()
    log.add_steps(np.array([7]), np.array([0]), np.array([5]))
    taken = log.take()
    assert taken == {"steps": [(7, 0, 5)], "kept": []}
    assert log.add_steps(np.array([7]), np.array([5]), np.array([1])) == 0
    assert taken["steps"] == [(7, 0, 5)]
