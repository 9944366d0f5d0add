"""Reads what the conversion needs to know out of a GGUF file (llama.cpp's format).

Needs gguf and numpy, which are imported where they are used, so that importing this module costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model_tokenizer import Vocabulary

if TYPE_CHECKING:
    import gguf
    import numpy as np
    import numpy.typing as npt
    from tokenizers import Tokenizer

    FloatArray = npt.NDArray[np.float32]

# The tensors of a layer that have the same place in every architecture here.
COMMON_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model, as its GGUF metadata gives them."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    max_tokens: int
    sliding_window: int | None
    rope_theta: float
    rms_norm_eps: float


@dataclass(frozen=True)
class Architecture:
    """How the models of one architecture differ between GGUF and the Hugging Face layout.

    Attributes:
        block_tensors: GGUF's name of each tensor of a layer -> the Hugging Face name.
        restore_weight: undoes what llama.cpp's converter did to a weight, of which it gets GGUF's
            name without layer and suffix, e.g. `attn_q`.
        config: what config.json says beside the entries that every architecture has.
        build_tokenizer: builds the kind of tokenizer that these models have.
    """

    block_tensors: Mapping[str, str]
    restore_weight: Callable[[str, FloatArray, Shape], FloatArray]
    config: Callable[[Shape], dict[str, Any]]
    build_tokenizer: Callable[[Vocabulary], Tokenizer]


def read_architecture(reader: gguf.GGUFReader) -> str:
    """Read llama.cpp's name of the architecture."""
    name: str = _field(reader, "general.architecture")
    return name


def read_shape(reader: gguf.GGUFReader) -> Shape:
    """Read the model's sizes from the GGUF metadata."""
    name = read_architecture(reader)
    hidden = _field(reader, f"{name}.embedding_length")
    heads = _field(reader, f"{name}.attention.head_count")
    return Shape(
        layers=_field(reader, f"{name}.block_count"),
        hidden=hidden,
        intermediate=_field(reader, f"{name}.feed_forward_length"),
        heads=heads,
        kv_heads=_field(reader, f"{name}.attention.head_count_kv"),
        head_dim=_field(reader, f"{name}.attention.key_length", hidden // heads),
        max_tokens=_field(reader, f"{name}.context_length"),
        sliding_window=_field(reader, f"{name}.attention.sliding_window", None),
        rope_theta=_shortest(_field(reader, f"{name}.rope.freq_base")),
        rms_norm_eps=_shortest(_field(reader, f"{name}.attention.layer_norm_rms_epsilon")),
    )


def read_vocabulary(reader: gguf.GGUFReader) -> Vocabulary:
    """Read what the GGUF metadata says about the tokenizer."""
    return Vocabulary(
        pre_tokenizer=_field(reader, "tokenizer.ggml.pre"),
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        token_types=_field(reader, "tokenizer.ggml.token_type"),
        merges=_field(reader, "tokenizer.ggml.merges", []),
        bos_id=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_id=_field(reader, "tokenizer.ggml.eos_token_id"),
        unk_id=_field(reader, "tokenizer.ggml.unknown_token_id"),
        pad_id=_field(reader, "tokenizer.ggml.padding_token_id"),
        adds_bos=_field(reader, "tokenizer.ggml.add_bos_token", False),
        chat_template=_field(reader, "tokenizer.chat_template", None),
        max_tokens=_field(reader, f"{read_architecture(reader)}.context_length"),
    )


_REQUIRED = object()


def _field(reader: gguf.GGUFReader, key: str, default: object = _REQUIRED) -> Any:
    """Return a metadata field, or, where it may be absent, the default given for that."""
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise ValueError(f"the GGUF file has no metadata field {key!r}")
    return default


def _shortest(value: float) -> float:
    """Return the shortest number that is the same float32 (1e-05, not 9.999999747378752e-06)."""
    import numpy as np

    return float(str(np.float32(value)))
