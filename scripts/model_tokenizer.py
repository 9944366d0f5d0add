"""Builds a Hugging Face tokenizer from the vocabulary that a GGUF file carries.

GGUF stores a byte-level BPE tokenizer as three arrays (tokens, token types, merges) and names its
pre-tokenizer; the regular expressions behind that name are not in the file, so they are here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

# GGUF's token type for control tokens such as <|im_start|>
_CONTROL = 3

# `tokenizer.ggml.pre`, the only pre-tokenizer this module knows how to build: every digit is a
# token of its own, and the rest is split as GPT-2 does.
_PRE_TOKENIZER = "smollm"


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF says about the tokenizer. Ids are positions in `tokens`."""

    pre_tokenizer: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int
    eos_id: int
    unk_id: int
    pad_id: int
    chat_template: str
    max_tokens: int

    def special_tokens(self) -> list[str]:
        """Return the control tokens, in id order."""
        pairs = zip(self.tokens, self.token_types, strict=True)
        return [token for token, kind in pairs if kind == _CONTROL]


def write_tokenizer(vocabulary: Vocabulary, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `directory`."""
    # Imported here so that a caller with nothing to convert doesn't need the package.
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in vocabulary.special_tokens()]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(vocabulary))


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, object]:
    special = vocabulary.special_tokens()
    return {
        # Upstream names GPT2Tokenizer, which newer transformers rebuild with GPT-2's own
        # pre-tokenizer, without the split of digits. This class takes tokenizer.json as it is.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(vocabulary.tokens.index(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in special
        },
        "bos_token": vocabulary.tokens[vocabulary.bos_id],
        "eos_token": vocabulary.tokens[vocabulary.eos_id],
        "unk_token": vocabulary.tokens[vocabulary.unk_id],
        "pad_token": vocabulary.tokens[vocabulary.pad_id],
        "chat_template": vocabulary.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": vocabulary.max_tokens,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
