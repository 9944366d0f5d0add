"""Builds a Hugging Face tokenizer from the vocabulary that a GGUF file carries.

GGUF stores a byte-level BPE tokenizer as three arrays (tokens, token types, merges) and names its
pre-tokenizer; the regular expressions behind that name are not in the file, so they are here.
Gemma's kind of tokenizer is in `model_gemma_tokenizer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# `tokenizer.ggml.pre`, the only pre-tokenizer this module knows how to build: every digit is a
# token of its own, and the rest is split as GPT-2 does.
_PRE_TOKENIZER = "smollm"


class TokenType(IntEnum):
    """GGUF's token types, those that are used here."""

    NORMAL = 1
    CONTROL = 3  # such as <|im_start|>
    USER_DEFINED = 4  # never cut into pieces, but text all the same


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF says about the tokenizer. Ids are positions in `tokens`."""

    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]  # empty where the kind of tokenizer has none in GGUF
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    adds_bos: bool
    chat_template: str | None
    max_tokens: int

    def typed_tokens(self) -> Iterator[tuple[str, int]]:
        """Return every token with its type, in id order."""
        return zip(self.tokens, self.token_types, strict=True)

    def of_type(self, wanted: TokenType) -> list[str]:
        """Return the tokens of one type, in id order."""
        return [token for token, kind in self.typed_tokens() if kind == wanted]


def write_tokenizer(tokenizer: Tokenizer, vocabulary: Vocabulary, directory: Path) -> None:
    """Add what every kind of tokenizer has; write tokenizer.json and tokenizer_config.json."""
    # Imported here so that a caller with nothing to convert doesn't need the package.
    from tokenizers import AddedToken, processors

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary.of_type(TokenType.CONTROL)]
    )
    if vocabulary.adds_bos:
        bos = vocabulary.tokens[vocabulary.bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, vocabulary.bos_id)],
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(vocabulary))


def build_byte_level(vocabulary: Vocabulary) -> Tokenizer:
    """Build SmolLM2's tokenizer, but for the special tokens, which are added to every kind."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if vocabulary.pre_tokenizer != _PRE_TOKENIZER:
        raise ValueError(
            f"the GGUF file names the pre-tokenizer {vocabulary.pre_tokenizer!r}; this script can "
            f"only build {_PRE_TOKENIZER!r}. Give it the SmolLM2 file it was written for."
        )
    merges = [_split_merge(merge) for merge in vocabulary.merges]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, object]:
    config = {
        # Upstream names GPT2Tokenizer for SmolLM2, which newer transformers rebuild with GPT-2's own
        # pre-tokenizer, without the split of digits. This class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, (token, kind) in enumerate(vocabulary.typed_tokens())
            if kind == TokenType.CONTROL
        },
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": vocabulary.max_tokens,
    }
    return {key: value for key, value in config.items() if value is not None}


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
