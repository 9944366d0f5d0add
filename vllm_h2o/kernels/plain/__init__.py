"""Tensor operations of torch, in float32."""
