"""Builds Gemma's tokenizer: SentencePiece's kind of BPE, with bytes for what has no token.

GGUF stores its tokens, their types and scores, but not the merges that a Hugging Face tokenizer
needs; those follow from the tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from model_tokenizer import TokenType, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# What SentencePiece writes for a space
_SPACE = "\u2581"


def build_sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    """Build the tokenizer, but for the special tokens, which are added to every kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    ids = {_spelling(token, kind): index for index, (token, kind) in enumerate(vocabulary.typed_tokens())}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(vocabulary),
            unk_token=vocabulary.tokens[vocabulary.unk_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    # Runs of spaces become tokens by merges: added ones are looked for before the normalizer runs.
    whole = [token for token in vocabulary.of_type(TokenType.USER_DEFINED) if " " not in token]
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in whole])
    return tokenizer


def _spelling(token: str, kind: int) -> str:
    """Return the token as SentencePiece spells it; llama.cpp's converter put spaces in some."""
    return token.replace(" ", _SPACE) if kind == TokenType.USER_DEFINED else token


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every split of a token in two others, the splits that apply first at the front."""
    from transformers.convert_slow_tokenizer import generate_merges

    # Text never merges into a token for a byte or a control token, even where it spells its name.
    mergeable = {
        _spelling(token, kind): index
        for index, (token, kind) in enumerate(vocabulary.typed_tokens())
        if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)
    }
    # In place of the scores, which follow the order of the ids, but not for the runs of spaces:
    # llama.cpp's converter gave those the lowest of all.
    scores = {token: -index for token, index in mergeable.items()}
    merges: list[tuple[str, str]] = generate_merges(mergeable, scores)
    return merges
