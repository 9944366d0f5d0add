"""Small models: seeded random weights, one for each architecture that works differently; and trained ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 512
MAX_POSITIONS = 2048
_SIZES = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_POSITIONS, "hidden_size": 128}
_LLAMA_LIKE = {
    **_SIZES,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def _gemma3(layer_types: list[str]) -> PretrainedConfig:
    sizes = {**_LLAMA_LIKE, "num_hidden_layers": len(layer_types)}
    return Gemma3TextConfig(**sizes, sliding_window=64, layer_types=layer_types, query_pre_attn_scalar=32)


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama-gqa": lambda: LlamaConfig(**_LLAMA_LIKE),
    "opt-learned-positions": lambda: OPTConfig(
        **_SIZES, ffn_dim=256, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=128
    ),
    "gpt-neox-partial-rotary": lambda: GPTNeoXConfig(
        **_SIZES, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, rotary_pct=0.25
    ),
    "qwen3-qk-norm": lambda: Qwen3Config(**_LLAMA_LIKE),
    "qwen2-attention-bias": lambda: Qwen2Config(**_LLAMA_LIKE),
    "gemma3-sliding-first": lambda: _gemma3(["sliding_attention", "full_attention"] * 2),
    "gemma3-full-first": lambda: _gemma3(["full_attention", "sliding_attention"] * 2),
}


def save(name: str, directory: Path, *, scale: float = 3.0, config: PretrainedConfig | None = None) -> Path:
    """Write the model ``name`` (of another ``config``, if given) under ``directory`` and return its path.

    The default initialisation makes attention nearly uniform; ``scale`` times larger weights make it peaked,
    so that scores tell tokens apart.
    """
    path = directory / name
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config or CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(path)
    return path


def first_layers(model: Path, num_layers: int, directory: Path) -> Path:
    """Write a Llama of the trained model's first layers under ``directory`` and return its path.

    What its heads attend to is as in the whole model, which takes as many times longer.
    """
    path = directory / f"{model.name}-{num_layers}"
    path.mkdir()
    weights = load_file(model / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < num_layers
    }
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = num_layers
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, path / name)
    return path


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids that any of the tiny models knows."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
