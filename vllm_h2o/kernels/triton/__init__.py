"""Triton kernels for GPUs. They import torch and triton only; ``prepare.py`` carries out a step's plan."""

MAX_HEAD_SIZE = 256
MAX_BLOCK_SIZE = 128
"""Tokens; a power of two. Both are here so that they can be asked for without importing Triton."""
