"""Prompts of an exact length in tokens, in the model's own chat format."""

from __future__ import annotations

import bisect
import random
from dataclasses import dataclass, field
from typing import Any

import quality_text
from quality_tasks import Example

_PLACE = "\u241f"  # stands for what the user says


class PromptError(ValueError):
    """An example doesn't fit the length; the message says what it needs."""


@dataclass
class PromptBuilder:
    """Makes token ids of examples.

    Attributes:
        tokenizer: of the model, with or without a chat format.
    """

    tokenizer: Any
    _fillers: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)

    def build(
        self, example: Example, num_tokens: int, *, question_after: bool, draw: random.Random
    ) -> list[int]:
        """The prompt of an example.

        Args:
            num_tokens: length of the whole prompt, or with ``question_after`` of all that comes before
                the question.
            draw: decides where the filler begins.

        Raises:
            PromptError: facts and question alone are longer.
        """
        before, after = self._frame(example.system)
        head = self._encode(before + example.instruction)
        question = self._encode(example.question + after + example.answer_start)
        facts = [(depth, self._encode(text)) for depth, text in example.facts]
        fixed = len(head) + sum(len(ids) for _, ids in facts) + (0 if question_after else len(question))
        room = num_tokens - fixed
        if room < 0:
            raise PromptError(f"{example.task} needs {fixed} tokens, the prompt has {num_tokens}")
        context, used = list(head), 0
        filler, ends = self._filler(example.filler, room, draw)
        for depth, ids in facts:
            # At the end of the sentence before, so that facts don't tear one apart.
            wanted = round(depth * room)
            stop = ends[max(0, bisect.bisect_right(ends, wanted) - 1)] if depth < 1 else room
            context += filler[used:stop] + ids
            used = max(used, stop)
        return context + filler[used:] + question

    def text_ids(self, num_tokens: int, which: int) -> list[int]:
        """Natural text for teacher forcing, a different stretch for every ``which``."""
        ids, _ = self._all("prose")
        first = which * num_tokens % (len(ids) - num_tokens)
        return ids[first : first + num_tokens]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _frame(self, system: str) -> tuple[str, str]:
        """What the chat format puts before and after the user's words, up to where the answer begins.

        A base model has none: there the answer follows on a line of its own.
        """
        if self.tokenizer.chat_template is None:
            return (self.tokenizer.bos_token or "") + (f"{system}\n\n" if system else ""), "\n"
        said = [{"role": "system", "content": system}] if system else []
        said.append({"role": "user", "content": _PLACE})
        text: str = self.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(_PLACE)
        return before, after

    def _all(self, kind: str) -> tuple[list[int], list[int]]:
        """All filler of a kind, and the sorted indices at which its sentences end."""
        if kind not in self._fillers:
            text = quality_text.prose() if kind == "prose" else quality_text.noise(100_000)
            ids = self._encode(text)
            stops = {i for i, token in enumerate(self.tokenizer.convert_ids_to_tokens(ids)) if "." in token}
            self._fillers[kind] = ids, sorted(i + 1 for i in stops)
        return self._fillers[kind]

    def _filler(self, kind: str, room: int, draw: random.Random) -> tuple[list[int], list[int]]:
        """``room`` tokens that begin with a sentence, and where sentences end in them (0 included)."""
        ids, ends = self._all(kind)
        last = bisect.bisect_right(ends, len(ids) - room) - 1
        start = ends[draw.randint(0, last)]
        inside = ends[bisect.bisect_right(ends, start) : bisect.bisect_right(ends, start + room)]
        return ids[start : start + room], [0, *(end - start for end in inside)]
