"""What is particular to Llama models (SmolLM2 is one) in the conversion from GGUF."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model_gguf import COMMON_BLOCK_TENSORS, Architecture, Shape
from model_tokenizer import build_byte_level

if TYPE_CHECKING:
    from model_gguf import FloatArray


def permute_rows(weight: FloatArray, heads: int) -> FloatArray:
    """Reorder the rows of a Q or K projection from the Hugging Face order to llama.cpp's.

    Rotary embedding turns pairs of rows. Hugging Face pairs row i of a head with row
    i + head_dim/2; llama.cpp pairs neighbours, 2i with 2i + 1.
    """
    rows = weight.shape[0]
    split = weight.reshape(heads, 2, rows // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def unpermute_rows(weight: FloatArray, heads: int) -> FloatArray:
    """Undo `permute_rows`: from llama.cpp's row order to the Hugging Face one."""
    rows = weight.shape[0]
    split = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _restore_weight(part: str, weight: FloatArray, shape: Shape) -> FloatArray:
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    return unpermute_rows(weight, heads[part]) if part in heads else weight


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
    }


LLAMA = Architecture(
    block_tensors={**COMMON_BLOCK_TENSORS, "ffn_norm": "post_attention_layernorm"},
    restore_weight=_restore_weight,
    config=_config,
    build_tokenizer=build_byte_level,
)
