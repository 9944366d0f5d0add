"""Converts a model from GGUF (llama.cpp's format) to the Hugging Face layout.

Needs numpy and gguf, to write the result torch, safetensors and tokenizers, and for Gemma
transformers. All of them are imported where they are used, so that importing this module costs
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from model_gemma import GEMMA
from model_gguf import Architecture, Shape, read_architecture, read_shape, read_vocabulary
from model_llama import LLAMA
from model_tokenizer import Vocabulary, write_tokenizer

if TYPE_CHECKING:
    import gguf

    from model_gguf import FloatArray

Dtype = Literal["bfloat16", "float32"]

# By llama.cpp's name of the architecture.
ARCHITECTURES = {"llama": LLAMA, "gemma3": GEMMA}

_OTHER_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def architecture_of(reader: gguf.GGUFReader) -> Architecture:
    """Return what has to be known about the architecture of the model in a GGUF file."""
    name = read_architecture(reader)
    if name not in ARCHITECTURES:
        known = " or ".join(repr(known) for known in ARCHITECTURES)
        raise ValueError(f"the GGUF file holds a {name!r} model, this needs {known}")
    return ARCHITECTURES[name]


def hugging_face_name(gguf_name: str, architecture: Architecture) -> str:
    """Return the Hugging Face name of a tensor, e.g. of `blk.3.attn_q.weight`."""
    if gguf_name in _OTHER_TENSORS:
        return _OTHER_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, part, "weight"] if part in architecture.block_tensors and layer.isdecimal():
            return f"model.layers.{layer}.{architecture.block_tensors[part]}.weight"
    raise ValueError(f"unknown tensor {gguf_name!r}: another architecture, or a newer GGUF layout")


def read_tensors(
    reader: gguf.GGUFReader, architecture: Architecture, shape: Shape
) -> Iterator[tuple[str, FloatArray]]:
    """Yield each weight under its Hugging Face name, dequantised to float32."""
    import gguf
    import numpy as np

    for tensor in reader.tensors:
        # A tensor that was never quantised comes back as a read-only view of the file; torch wants
        # memory that it may write to.
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
        # "blk.3.attn_q.weight" -> "attn_q"
        part = tensor.name.split(".")[-2]
        yield hugging_face_name(tensor.name, architecture), architecture.restore_weight(part, weight, shape)


def model_config(
    architecture: Architecture, shape: Shape, vocabulary: Vocabulary, dtype: Dtype, *, tied: bool
) -> Any:
    """Return the contents of config.json."""
    return {
        **architecture.config(shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        **_token_ids(vocabulary),
        "head_dim": shape.head_dim,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.max_tokens,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": len(vocabulary.tokens),
    }


def convert(gguf_path: Path, directory: Path, dtype: Dtype) -> None:
    """Write the model in `gguf_path` into `directory` in the Hugging Face layout."""
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(gguf_path)
    architecture = architecture_of(reader)
    shape = read_shape(reader)
    vocabulary = read_vocabulary(reader)
    torch_dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    weights = {
        name: torch.from_numpy(weight).to(torch_dtype).contiguous()
        for name, weight in read_tensors(reader, architecture, shape)
    }
    # Without an output matrix of its own the model uses its embedding for that.
    tied = "lm_head.weight" not in weights
    weights_path = directory / "model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    # save_file makes it private to this user, unlike the other files.
    weights_path.chmod(0o644)
    write_tokenizer(architecture.build_tokenizer(vocabulary), vocabulary, directory)
    config = model_config(architecture, shape, vocabulary, dtype, tied=tied)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", _token_ids(vocabulary))


def _token_ids(vocabulary: Vocabulary) -> dict[str, int]:
    return {
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "pad_token_id": vocabulary.pad_id,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
