"""Everything that touches vLLM; the only package (with ``vllm_h2o.plugin``) that may import it."""
