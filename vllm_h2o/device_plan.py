"""Plans of steps whose block tables lie on a device: the host works with numbers, and only those.

What a step has to do follows from each row's computed and new tokens, which the host knows
(``vllm_h2o.step_plan``). Ids of blocks it doesn't know, and waiting for them would cost more than the work
itself; so a plan for a device names blocks by row and place, and they are looked up there.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.planner import StepPlanner
from vllm_h2o.request_ring import RequestRing
from vllm_h2o.step_plan import Batch, IntArray, ScoreRows, StepPlan


@dataclass(frozen=True)
class DeviceTable:
    """Rows of a logical block table on a device, each with a gap of blocks that are gone.

    Attributes:
        table: ``[all rows, width]`` int32 on the device.
        rows: ``[num_rows]`` which of its rows.
        gap_blocks, pinned_blocks: ``[num_rows]``, the gap is behind the pinned ones.
    """

    table: torch.Tensor
    rows: IntArray
    gap_blocks: IntArray
    pinned_blocks: IntArray

    def __getitem__(self, chosen: Any) -> "DeviceTable":
        numbers = (self.rows, self.gap_blocks, self.pinned_blocks)
        return DeviceTable(self.table, *(array[chosen] for array in numbers))

    def live(self, num_blocks: int) -> torch.Tensor:
        """``[num_rows, num_blocks]`` int32, live blocks in order, then ids that nobody may read."""
        packed = torch.from_numpy(np.stack([self.rows, self.gap_blocks, self.pinned_blocks], axis=1))
        if self.table.is_cuda:
            packed = packed.pin_memory()
        rows, gaps, pinned = packed.to(self.table.device, non_blocking=True).split(1, dim=1)
        columns = torch.arange(num_blocks, device=self.table.device)
        source = torch.where(columns >= pinned, columns + gaps, columns)
        return self.table[rows, source.clamp_(max=self.table.shape[1] - 1)]


@dataclass(frozen=True)
class DeviceBatch(Batch):
    """As ``Batch``, with tables on a device.

    Attributes:
        requests: ``[num_rows]``, the runner's index of each row's request.
    """

    requests: IntArray


class DevicePlanner(StepPlanner):
    """A ``StepPlanner`` that never looks into a block table."""

    ring: RequestRing

    def __init__(self, config: KVPolicyConfig, ring: RequestRing) -> None:
        super().__init__(config, ring, trace=None)

    def device_batch(
        self, seq_lens: IntArray, query_start: IntArray, table: torch.Tensor, requests: IntArray
    ) -> DeviceBatch:
        """As ``StepPlanner.batch``; ``table`` is on the device, and rows behind the requests are padding."""
        new = np.diff(query_start)
        computed = seq_lens - new
        limits = self._limits(None, new.size)
        gap, pinned = self._evicted(computed, limits), limits.pinned_blocks
        padded = np.full(new.size, -1)
        padded[: requests.size] = requests
        rows = DeviceTable(table, np.arange(new.size), gap, pinned)
        after, evicts = self._evicted(seq_lens, limits), np.ones(new.size, dtype=np.bool_)
        return DeviceBatch(computed, new, query_start[:-1], rows, gap, rows, after, pinned, evicts, padded)

    def plan(self, batch: Batch) -> StepPlan:
        """The step's plan; its ``started_blocks`` are indices into ``table``, flattened."""
        assert isinstance(batch.table, DeviceTable)
        return replace(super().plan(batch), table=batch.table.table)

    def _pending_before(self, batch: Batch) -> ScoreRows:
        pending = super()._pending_before(batch)
        self.ring.forget(self._ring_keys(batch))
        return pending

    def _is_real(self, batch: Batch) -> npt.NDArray[np.bool_]:
        real: npt.NDArray[np.bool_] = batch.new > 0
        return real

    def _ring_keys(self, batch: Batch) -> IntArray:
        assert isinstance(batch, DeviceBatch)
        return batch.requests

    def _block_ids(self, batch: Batch, rows: IntArray, block_idx: IntArray) -> IntArray:
        assert isinstance(batch.table, DeviceTable)
        return batch.table.rows[rows] * batch.table.table.shape[1] + block_idx
