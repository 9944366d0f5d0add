"""Triton kernels for GPUs. They import torch and triton only; ``prepare.py`` carries out a step's plan."""

MAX_HEAD_SIZE = 256
MAX_BLOCK_SIZE = 128
"""Tokens; a power of two. Both are here so that they can be asked for without importing Triton."""

VARYING = (
    *("table_stride", "width", "victim_width", "move_width", "num_words", "num_weights", "lse_stride_layer"),
)
"""Arguments that change from step to step: Triton must not compile a kernel anew for their values."""
