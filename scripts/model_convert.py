"""Converts a Llama model from GGUF (llama.cpp's format) to the Hugging Face layout.

Needs numpy and gguf, and to write the result torch, safetensors and tokenizers. All of them are
imported where they are used, so that importing this module costs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model_tokenizer import Vocabulary, write_tokenizer

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]

Dtype = Literal["bfloat16", "float32"]

_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama model, as its GGUF metadata gives them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    max_tokens: int
    rope_theta: float
    rms_norm_eps: float


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


def hugging_face_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a tensor, e.g. of `blk.3.attn_q.weight`."""
    if gguf_name in _OTHER_TENSORS:
        return _OTHER_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in _BLOCK_TENSORS and layer.isdecimal():
            return f"model.layers.{layer}.{_BLOCK_TENSORS[part]}.weight"
    raise ValueError(f"unknown tensor {gguf_name!r}: not a Llama model, or a newer GGUF layout")


def read_shape(reader: gguf.GGUFReader) -> LlamaShape:
    """Read the model's sizes from the GGUF metadata."""
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds a {architecture!r} model, this needs 'llama'")
    return LlamaShape(
        layers=_field(reader, "llama.block_count"),
        hidden=_field(reader, "llama.embedding_length"),
        intermediate=_field(reader, "llama.feed_forward_length"),
        heads=_field(reader, "llama.attention.head_count"),
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        vocab=_field(reader, "llama.vocab_size"),
        max_tokens=_field(reader, "llama.context_length"),
        rope_theta=_shortest(_field(reader, "llama.rope.freq_base")),
        rms_norm_eps=_shortest(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
    )


def read_vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    """Read the tokenizer's arrays from the GGUF metadata."""
    return Vocabulary(
        pre_tokenizer=_field(reader, "tokenizer.ggml.pre"),
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        token_types=_field(reader, "tokenizer.ggml.token_type"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        bos_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        unk_id=_field(reader, "tokenizer.ggml.unknown_token_id"),
        pad_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        chat_template=_field(reader, "tokenizer.chat_template"),
        max_tokens=_field(reader, "llama.context_length"),
    )


def read_tensors(reader: gguf.GGUFReader, shape: LlamaShape) -> Iterator[tuple[str, FloatArray]]:
    """Yield each weight under its Hugging Face name, dequantised to float32."""
    import gguf
    import numpy as np

    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    for tensor in reader.tensors:
        # A tensor that was never quantised comes back as a read-only view of the file; torch wants
        # memory that it may write to.
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        # "blk.3.attn_q.weight" -> "attn_q"
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = unpermute_rows(weight, heads[part])
        yield hugging_face_name(tensor.name), weight


def model_config(shape: LlamaShape, vocabulary: Vocabulary, dtype: Dtype, *, tied: bool) -> Any:
    """Return the contents of config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_tokens,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": shape.vocab,
    }


def convert(gguf_path: Path, directory: Path, dtype: Dtype) -> None:
    """Write the model in `gguf_path` into `directory` in the Hugging Face layout."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_path)
    shape = read_shape(reader)
    vocabulary = read_vocabulary(reader)
    torch_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    weights = {
        name: torch.from_numpy(weight).to(torch_dtype).contiguous()
        for name, weight in read_tensors(reader, shape)
    }
    # Without an output matrix of its own the model uses its embedding for that.
    tied = "lm_head.weight" not in weights
    weights_path = directory / "model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    # save_file makes it private to this user, unlike the other files.
    weights_path.chmod(0o644)
    write_tokenizer(vocabulary, directory)
    _write_json(directory / "config.json", model_config(shape, vocabulary, dtype, tied=tied))
    _write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": vocabulary.bos_id,
            "eos_token_id": vocabulary.eos_id,
            "pad_token_id": vocabulary.pad_id,
        },
    )


def _field(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no metadata field {key!r}")
    return field.contents()


def _shortest(value: float) -> float:
    """Return the shortest number that is the same float32 (1e-05, not 9.999999747378752e-06)."""
    import numpy as np

    return float(str(np.float32(value)))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
