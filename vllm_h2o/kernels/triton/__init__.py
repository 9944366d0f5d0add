"""Triton kernels for GPUs. They import torch and triton only; ``prepare.py`` carries out a step's plan."""
