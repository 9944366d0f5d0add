"""vllm-h2o: bounds the KV cache of every vLLM request with the H2O policy.

Importing this package imports neither vLLM nor torch; ``vllm_h2o.plugin.register`` is what vLLM calls.
"""

__version__ = "0.1.0"
