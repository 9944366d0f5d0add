"""Text for quality tests, from what every Python brings along: always there, never downloaded.

The language reference of ``pydoc_data`` is natural prose with some code. Its words differ a little between
Python versions, so results name the version.
"""

from __future__ import annotations

import re
from pydoc_data.topics import topics

NOISE = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "  # as RULER's
)


def prose() -> str:
    """The longest topics one after the other, in a fixed order."""
    texts = sorted(topics.values(), key=lambda text: (-len(text), text))
    return re.sub(r"[ \t]+", " ", "\n\n".join(text.strip() for text in texts))


def noise(num_chars: int) -> str:
    """The same five sentences over and over."""
    return NOISE * (num_chars // len(NOISE) + 1)
