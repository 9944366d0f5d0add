"""Conversations for load tests, in the format of ShareGPT's file, made offline from this repository's texts.

Lengths are drawn as chats have them: prompts and answers of a few words up to several hundred, most of them
short. What they say doesn't matter to a load test; that it is text in natural words does, as tokens per word
then are what they usually are.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from setup_steps import ROOT

NUM_CONVERSATIONS = 400

_SOURCE = ROOT / "LICENSE"  # rarely changes, so that results stay comparable
_MEDIAN_WORDS = (60, 140)  # of a prompt and of an answer
_SPREAD = 0.9  # of the logarithm of a length
_MOST_WORDS = 600


def conversations(seed: int = 0) -> list[dict[str, object]]:
    """One prompt and one answer each; the same for the same seed."""
    words = _SOURCE.read_text(encoding="utf-8").split()
    draw = random.Random(seed)

    def text(median_words: int) -> str:
        length = min(_MOST_WORDS, max(4, round(draw.lognormvariate(0.0, _SPREAD) * median_words)))
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    return [
        {
            "id": str(number),
            "conversations": [
                # The number comes first, so that no two prompts share a prefix.
                {"from": "human", "value": f"{number}. {text(_MEDIAN_WORDS[0])}"},
                {"from": "gpt", "value": text(_MEDIAN_WORDS[1])},
            ],
        }
        for number in range(NUM_CONVERSATIONS)
    ]


def write(path: Path) -> Path:
    """Write them to ``path`` and return it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(conversations()), encoding="utf-8")
    return path
