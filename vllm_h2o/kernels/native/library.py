"""The compiled kernels as Python sees them; the structures mirror ``layer.h``."""

import ctypes
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from vllm_h2o.kernels.native.build import BuildError, build

ABI_VERSION = 4

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of the dtypes of a cache."""


class Layer(ctypes.Structure):
    """``h2o::Layer``."""

    _fields_: ClassVar = [
        ("cache", c_void_p),
        ("block_bytes", c_int64),
        ("scores_offset_bytes", c_int64),
        ("positions_offset_bytes", c_int64),
        ("dtype", c_int64),
        ("for_amx", c_int64),
        ("num_kv_heads", c_int64),
        ("group", c_int64),
        ("head_size", c_int64),
        ("block_size", c_int64),
        ("ring", c_void_p),
        ("sinks", c_void_p),
        ("scale", c_double),
        ("softcap", c_double),
        ("salt", c_int64),
    ]


class Step(ctypes.Structure):
    """``h2o::Step``."""

    _fields_: ClassVar = [
        ("num_appended", c_int64),
        ("append_tokens", c_void_p),
        ("append_slots", c_void_p),
        ("num_started", c_int64),
        ("started_blocks", c_void_p),
        ("started_positions", c_void_p),
        ("num_early_rows", c_int64),
        ("num_score_rows", c_int64),
        ("score_rows", c_void_p),
        ("num_drop_rows", c_int64),
        ("drop_rows", c_void_p),
        ("pinned_tokens", c_int64),
        ("recent_tokens", c_int64),
        ("score_pool", c_int64),
        ("by_block", c_int64),
        ("rank_by", c_int64),
        ("total_weights", c_void_p),
    ]


SCORE_ROW = np.dtype(
    [
        ("from_ring", np.int64),
        ("first_query", np.int64),
        ("num_queries", np.int64),
        ("num_live", np.int64),
        ("blocks", np.uintp),
        ("weights", np.uintp),
        ("decay", np.float64),
    ]
)
"""``h2o::ScoreRow``."""

DROP_ROW = np.dtype(
    [
        ("num_live", np.int64),
        ("num_dropped", np.int64),
        ("num_tokens", np.int64),
        ("pinned_tokens", np.int64),
        ("blocks", np.uintp),
    ]
)
"""``h2o::DropRow``."""


@cache
def load() -> ctypes.CDLL:
    """The library, compiled if need be.

    Raises:
        BuildError: it can't be compiled or loaded.
    """
    path = build()
    try:
        # torch is imported: its OpenMP runtime is what the library's symbols resolve to.
        library = ctypes.CDLL(str(path))
        library.h2o_abi_version.restype = c_int64
        version = library.h2o_abi_version()
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path} can't be loaded: {error}") from error
    assert version == ABI_VERSION, f"{path} is of version {version}"
    library.h2o_after_attention.argtypes = [c_void_p, c_void_p, c_void_p, c_int64]
    library.h2o_after_attention.restype = None
    library.h2o_scratch_bytes.argtypes = [c_int64, c_int64, c_int64]
    library.h2o_scratch_bytes.restype = c_int64
    return library
