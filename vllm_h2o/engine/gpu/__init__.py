"""The engine on GPUs: FlashAttention and Triton attention under vLLM's V2 model runner.

What a step leaves to do (kept queries to score, tokens to drop) is done at the beginning of the next one, for
all layers at once, so that decoding can run in full CUDA graphs: inside those, queries are kept and no more.
Nothing here waits for the device.
"""
