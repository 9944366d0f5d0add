"""Retrieval tasks with answers that can be checked, generated from a seed (recipes after RULER,
arXiv 2404.06654).

Every example is a context that holds the facts, and a question that ends where the answer begins. Facts
are put at random depths unless a depth is given; the rest is filler.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

CITIES = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Oslo", "Dublin", "Athens", "Lisbon"),
    *("Prague", "Warsaw", "Cairo", "Tokyo", "Delhi", "Sydney", "Toronto", "Boston", "Chicago", "Denver"),
)


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        facts: sentences of the context with their depths, 0 (first) to 1 (last), in order.
        filler: ``prose`` or ``noise``.
        instruction: what is said before the context.
        question: what is said after it.
        answer_start: first words of the answer, given to the model.
        answers: what the answer must hold; the score is the share of them that it does.
        max_tokens: length of the answer.
        system: what the system prompt says; empty where the model's own is left as it is.
    """

    task: str
    facts: tuple[tuple[float, str], ...]
    filler: str
    instruction: str
    question: str
    answer_start: str
    answers: tuple[str, ...]
    max_tokens: int
    system: str = ""

    def score(self, text: str) -> float:
        """Share of the answers that are in ``text``."""
        lower = text.lower()
        return sum(answer.lower() in lower for answer in self.answers) / len(self.answers)


def _number(draw: random.Random, taken: set[str]) -> str:
    while (number := str(draw.randrange(10_000, 100_000))) in taken:
        pass
    taken.add(number)
    return number


def _needles(
    task: str, draw: random.Random, keys: int, values: int, asked: int, depth: float | None, filler: str
) -> Example:
    """``keys`` cities with ``values`` numbers each, of which ``asked`` cities are asked for."""
    cities, taken = draw.sample(CITIES, keys), set[str]()
    numbers = {city: [_number(draw, taken) for _ in range(values)] for city in cities}
    facts = [
        (draw.random(), f" The special magic number for {city} is {number}.")
        for city in cities
        for number in numbers[city]
    ]
    if depth is not None:
        facts[0] = (depth, facts[0][1])
    chosen = cities[:asked]
    names = " and ".join(chosen)
    what = "number" if asked * values == 1 else "numbers"
    verb = "is" if asked * values == 1 else "are"
    return Example(
        task=task,
        facts=tuple(sorted(facts)),
        filler=filler,
        instruction="Some special magic numbers are hidden in the following text. Remember them.\n\n",
        question=f"\n\nWhat {verb} the special magic {what} for {names} mentioned in the text?",
        answer_start=f"The special magic {what} for {names} mentioned in the text {verb}",
        answers=tuple(number for city in chosen for number in numbers[city]),
        max_tokens=4 + 8 * asked * values,
    )


def needle_single(draw: random.Random, depth: float | None) -> Example:
    return _needles("needle_single", draw, 1, 1, 1, depth, "prose")


def needle_noise(draw: random.Random, depth: float | None) -> Example:
    return _needles("needle_noise", draw, 1, 1, 1, depth, "noise")


def needle_multikey(draw: random.Random, depth: float | None) -> Example:
    return _needles("needle_multikey", draw, 4, 1, 1, depth, "prose")


def needle_multivalue(draw: random.Random, depth: float | None) -> Example:
    return _needles("needle_multivalue", draw, 1, 2, 1, depth, "prose")


def needle_multiquery(draw: random.Random, depth: float | None) -> Example:
    return _needles("needle_multiquery", draw, 2, 1, 2, depth, "prose")


def key_value(draw: random.Random, depth: float | None, pairs: int = 8) -> Example:
    """A list of pairs somewhere in the text; one is asked for."""
    where = draw.random() if depth is None else depth
    cities, taken = draw.sample(CITIES, len(CITIES)), set[str]()
    extra = [f"{a}{b}" for a, b in zip(cities, reversed(cities), strict=True)]
    keys = [*cities, *extra][:pairs]
    values = {key: _number(draw, taken) for key in keys}
    asked = draw.choice(keys)
    return Example(
        task="key_value",
        facts=tuple((where, f"\nThe value of the key {key} is {value}.") for key, value in values.items()),
        filler="prose",
        instruction="The following text has a list of keys and values.\n",
        question=f"\n\nWhat is the value of the key {asked}?",
        answer_start=f"The value of the key {asked} is",
        answers=(values[asked],),
        max_tokens=10,
    )


def variable_tracking(draw: random.Random, depth: float | None) -> Example:
    """A chain of two assignments; the first variable's value has to be found through the second's."""
    names = ["".join(draw.sample(string.ascii_uppercase, 4)) for _ in range(2)]
    value = _number(draw, set())
    depths = sorted(draw.random() for _ in names)
    facts = [(depths[0], f" VAR {names[0]} = {value}."), (depths[1], f" VAR {names[1]} = VAR {names[0]}.")]
    return Example(
        task="variable_tracking",
        facts=tuple(facts),
        filler="noise",
        instruction="Remember the variables that are assigned in the following text.\n\n",
        question=f"\n\nWhich variables have the value {value}?",
        answer_start=f"The variables that have the value {value} are",
        answers=tuple(names),
        max_tokens=16,
    )


def _words(draw: random.Random, count: int) -> list[str]:
    """Words of the kind that models read as one or two tokens."""
    vowels, consonants = "aeiou", "bdfgklmnprstv"
    words: set[str] = set()
    while len(words) < count:
        words.add("".join(draw.choice(consonants) + draw.choice(vowels) for _ in range(3)))
    return sorted(words)


def common_words(draw: random.Random, depth: float | None) -> Example:
    """A list somewhere in the text, in which three words come six times as often as the others."""
    where = draw.random() if depth is None else depth
    words = _words(draw, 40)
    draw.shuffle(words)
    often, seldom = words[:3], words[3:]
    listed = often * 6 + seldom
    draw.shuffle(listed)
    return Example(
        task="common_words",
        facts=tuple((where, f"\n{i + 1}. {word}") for i, word in enumerate(listed)),
        filler="prose",
        instruction="Remember which words appear most often in the following list.\n\n",
        question="\n\nWhat are the three most common words in the list?",
        answer_start="The three most common words in the list are",
        answers=tuple(often),
        max_tokens=24,
    )


def frequent_words(draw: random.Random, depth: float | None) -> Example:
    """Coded words that follow Zipf's law, somewhere in the text; the most frequent one is asked for."""
    where = draw.random() if depth is None else depth
    words = _words(draw, 30)
    draw.shuffle(words)
    text = [word for rank, word in enumerate(words) for _ in range(max(1, round(24 / (rank + 1) ** 2)))]
    draw.shuffle(text)
    return Example(
        task="frequent_words",
        facts=tuple((where, f" {word}") for word in text),
        filler="prose",
        instruction="Remember which coded word appears most often in the following text.\n\n",
        question="\n\nWhat is the most frequent coded word in the text?",
        answer_start="The most frequent coded word in the text is",
        answers=(words[0],),
        max_tokens=8,
    )


def instruction(draw: random.Random, depth: float | None) -> Example:
    """A rule at the very beginning, which must still be obeyed behind a long text.

    The first token of an answer comes from the whole prompt, before it is cut, so what is asked for is not
    the first.
    """
    while (secret := draw.choice(CITIES)) == "Paris":  # which the question names
        pass
    return Example(
        task="instruction",
        facts=(),
        filler="prose",
        instruction=f"Rule: end every answer with the words 'Greetings from {secret}'.\n\n",
        question="\n\nWhat is the capital of France? Remember the rule.",
        answer_start="The capital of France is Paris. Greetings",
        answers=(secret,),
        max_tokens=8,
    )


def system_instruction(draw: random.Random, depth: float | None) -> Example:
    """The same rule in a system prompt that is longer than the pinned block."""
    told = instruction(draw, depth)
    manners = (
        "You are the assistant of a travel agency. Answer briefly, in plain words, and never guess. " * 3
    )
    return replace(told, task="system_instruction", instruction="", system=manners + told.instruction.strip())


TASKS: dict[str, Callable[[random.Random, float | None], Example]] = {
    task.__name__: task
    for task in (
        *(needle_single, needle_noise, needle_multikey, needle_multivalue, needle_multiquery),
        *(key_value, variable_tracking, common_words, frequent_words, instruction, system_instruction),
    )
}


def examples(task: str, count: int, seed: int) -> Iterator[Example]:
    """``count`` examples, the first fact's depth swept from 0 to 1."""
    for i in range(count):
        draw = random.Random(f"{task} {seed} {i}")
        yield TASKS[task](draw, i / max(1, count - 1))
