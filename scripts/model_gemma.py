"""What is particular to Gemma 3 models (text only) in the conversion from GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_gemma_tokenizer import build_sentencepiece
from model_gguf import COMMON_BLOCK_TENSORS, Architecture, Shape

if TYPE_CHECKING:
    from model_gguf import FloatArray

# These two are the same in every Gemma 3 model, so GGUF leaves them out. Every sixth layer attends
# to everything, the others to a sliding window, with a rotary embedding of their own.
_FULL_ATTENTION_EVERY = 6
_SLIDING_ROPE_THETA = 10000.0


def _restore_weight(part: str, weight: FloatArray, shape: Shape) -> FloatArray:
    # Gemma multiplies by 1 + weight in its norms and stores the weight; llama.cpp's converter adds
    # the 1 beforehand. Unlike Llama's, the rows of Q and K stay in the Hugging Face order.
    return weight - 1 if part.endswith("_norm") else weight


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [_layer_type(layer) for layer in range(shape.layers)],
        # Not in GGUF either: the size of a head, in every size of the model but 27B.
        "query_pre_attn_scalar": shape.head_dim,
        "rope_local_base_freq": _SLIDING_ROPE_THETA,
        "sliding_window": shape.sliding_window,
    }


def _layer_type(layer: int) -> str:
    return "sliding_attention" if (layer + 1) % _FULL_ATTENTION_EVERY else "full_attention"


GEMMA = Architecture(
    block_tensors={
        **COMMON_BLOCK_TENSORS,
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    restore_weight=_restore_weight,
    config=_config,
    build_tokenizer=build_sentencepiece,
)
