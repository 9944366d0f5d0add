"""A step's work as the C++ kernels take it: one call per layer, and one more where tokens are dropped."""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_h2o.config import RANKS, KVPolicyConfig
from vllm_h2o.kernels.base import Kernels, LayerSizes, LayerState, PreparedStep
from vllm_h2o.kernels.native import library
from vllm_h2o.step_plan import BlockTable, DropRows, ScoreRows, StepPlan


class NativeKernels(Kernels):
    """Compiled for this machine when made.

    Raises:
        BuildError: they can't be compiled here.
    """

    name = "native"

    def __init__(self, config: KVPolicyConfig) -> None:
        super().__init__(config)
        self._library = library.load()
        # Only as many layers as the model has; keyed by what the structure was made from.
        self._layers: dict[int, tuple[LayerState, library.Layer]] = {}

    def prepare(self, plan: StepPlan) -> "NativeStep":
        return NativeStep(self, plan)

    def scratch_bytes(self, sizes: LayerSizes) -> int:
        config, threads = self.config, torch.get_num_threads()
        live_tokens = config.max_blocks_per_request * config.block_size
        # Which slot a position is in, in each thread.
        pooling = 4 * config.max_model_len * threads if config.score_pool > 1 else 0
        if not config.scores_attention:
            # The directions of one head's keys in each thread.
            by_keys = 4 * live_tokens * sizes.head_size * threads if config.rank_by == "keys" else 0
            return pooling + by_keys
        scoring = self._library.h2o_scratch_bytes(live_tokens, sizes.num_kv_heads, sizes.head_size)
        return pooling + int(scoring)

    def layer(self, state: LayerState) -> library.Layer:
        """The layer's structure, made when its memory is first seen."""
        known = self._layers.get(id(state))
        if known is None:
            known = self._layers[id(state)] = state, _layer(state)
        return known[1]


class NativeStep(PreparedStep):
    """Holds the arrays that the structure points into."""

    def __init__(self, kernels: NativeKernels, plan: StepPlan) -> None:
        config = kernels.config
        self._kernels = kernels
        self._call = kernels._library.h2o_after_attention
        scores = [_score_rows(rows) for rows in plan.scores]
        # A row that is scored twice in a step has its kept queries in front.
        early = len(scores[0]) if len(scores) > 1 else 0
        score_rows = np.concatenate(scores) if scores else np.empty(0, library.SCORE_ROW)
        drop_rows = _drop_rows(plan.drops)
        self._keep_alive: list[Any] = [plan, score_rows, drop_rows]
        rules = {
            "pinned_tokens": config.pinned_tokens,
            "recent_tokens": config.recent_tokens,
            "score_pool": config.score_pool,
            "by_block": config.granularity == "block",
            "rank_by": RANKS.index(config.rank_by),
        }
        self._scoring = library.Step(
            num_appended=plan.append_tokens.size,
            append_tokens=self._address(plan.append_tokens),
            append_slots=self._address(plan.append_slots),
            num_started=plan.started_blocks.size,
            started_blocks=self._address(plan.started_blocks),
            started_positions=self._address(plan.started_positions),
            num_early_rows=early,
            num_score_rows=score_rows.size,
            score_rows=self._address(score_rows),
            **rules,
        )
        self._dropping: library.Step | None = None
        if plan.drops is not None:
            self._dropping = library.Step(
                num_drop_rows=drop_rows.size,
                drop_rows=self._address(drop_rows),
                total_weights=self._address(plan.drops.total_weights),
                **rules,
            )

    def update_scores(self, layer: LayerState, query: torch.Tensor) -> None:
        assert query.stride()[1:] == layer.ring.stride()[1:] and query.dtype == layer.ring.dtype
        query_bytes = query.stride(0) * query.element_size()
        self._run(layer, self._scoring, query.data_ptr(), query_bytes)

    def drop_tokens(self, layer: LayerState) -> None:
        if self._dropping is not None:
            self._run(layer, self._dropping, 0, 0)

    def _run(self, layer: LayerState, step: library.Step, query: int, query_bytes: int) -> None:
        self._call(ctypes.addressof(self._kernels.layer(layer)), ctypes.addressof(step), query, query_bytes)

    def _address(self, array: npt.NDArray[Any]) -> int:
        if not array.size:
            return 0
        contiguous = np.ascontiguousarray(array)
        self._keep_alive.append(contiguous)
        return _data_pointer(contiguous)


def _layer(state: LayerState) -> library.Layer:
    cache, ring = state.cache, state.ring
    num_kv_heads, head_size, block_size = cache.num_kv_heads, cache.head_size, cache.block_size
    bytes_of = cache.keys.element_size()
    # What the structure leaves out has to be as the CPU layouts say (vllm_h2o.layout).
    of_head = 2 * head_size * block_size
    if cache.for_amx:
        assert _has_strides(cache.keys, of_head, 32, 1, 16 * head_size, 2)
        assert _has_strides(cache.values, of_head, 32, 1, 16 * block_size, 2)
    else:
        assert _has_strides(cache.keys, of_head, block_size, 1)
        assert _has_strides(cache.values, of_head, head_size, 1)
    assert _has_strides(cache.scores, block_size, 1)
    assert ring.is_contiguous() and ring.dtype == cache.keys.dtype and ring.shape[2] == head_size
    sinks = state.shape.sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    positions = 0 if cache.positions is None else cache.positions.data_ptr() - cache.keys.data_ptr()
    return library.Layer(
        cache=cache.keys.data_ptr(),
        block_bytes=cache.keys.stride(0) * bytes_of,
        scores_offset_bytes=cache.scores.data_ptr() - cache.keys.data_ptr(),
        positions_offset_bytes=positions,
        dtype=library.DTYPES[cache.keys.dtype],
        for_amx=cache.for_amx,
        num_kv_heads=num_kv_heads,
        group=ring.shape[1] // num_kv_heads,
        head_size=head_size,
        block_size=block_size,
        ring=ring.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        scale=state.shape.scale,
        softcap=state.shape.softcap,
        salt=state.salt,
    )


def _has_strides(view: torch.Tensor, *expected: int) -> bool:
    """Whether the dimensions behind the first have these strides; one of size 1 may have any."""
    dims = zip(view.stride()[1:], expected, view.shape[1:], strict=True)
    return all(stride == wanted or size == 1 for stride, wanted, size in dims)


def _data_pointer(array: npt.NDArray[Any]) -> int:
    # Not `array.ctypes.data`: that makes an object of Python's for every address.
    return int(array.__array_interface__["data"][0])


def _row_addresses(table: BlockTable) -> npt.NDArray[np.uintp]:
    assert table.dtype == np.int32 and (table.shape[1] <= 1 or table.strides[1] == 4)
    addresses = _data_pointer(table) + np.arange(table.shape[0]) * table.strides[0]
    return addresses.astype(np.uintp)


def _score_rows(rows: ScoreRows) -> npt.NDArray[Any]:
    packed = np.empty(rows.num_live.size, dtype=library.SCORE_ROW)
    packed["from_ring"] = rows.from_ring
    packed["first_query"] = rows.first_query
    packed["num_queries"] = rows.num_queries
    packed["num_live"] = rows.num_live
    packed["blocks"] = _row_addresses(rows.live_table)
    assert rows.weights.dtype == np.float32 and rows.weights.flags.c_contiguous
    packed["weights"] = _data_pointer(rows.weights) + 4 * (rows.weights.size - rows.num_queries)
    packed["decay"] = rows.decay
    return packed


def _drop_rows(rows: DropRows | None) -> npt.NDArray[Any]:
    packed = np.empty(0 if rows is None else rows.num_live.size, dtype=library.DROP_ROW)
    if rows is not None:
        packed["num_live"] = rows.num_live
        packed["num_dropped"] = rows.num_dropped
        packed["num_tokens"] = rows.num_tokens
        packed["pinned_tokens"] = rows.pinned_tokens
        packed["blocks"] = _row_addresses(rows.live_table)
    return packed
