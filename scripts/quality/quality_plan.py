"""What a quality test runs: one YAML file of configs/quality, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from quality_tasks import TASKS

FULL = "full cache"


class PlanError(ValueError):
    """A plan says something that can't be run; the message names it."""


@dataclass(frozen=True)
class Contender:
    """One policy with its settings, under one budget.

    Attributes:
        settings: as in ``additional_config``, without the budget; None is plain vLLM.
        budget_percent: of the sequence.
    """

    name: str
    settings: dict[str, Any] | None
    budget_percent: int

    @property
    def label(self) -> str:
        return self.name if self.settings is None else f"{self.name}, {self.budget_percent} %"

    def policy(self, sequence_tokens: int) -> dict[str, Any] | None:
        """What an engine gets for sequences of that length."""
        if self.settings is None:
            return None
        share = self.budget_percent / 100
        return {**self.settings, "budget": round(sequence_tokens * share) if share < 1 else 1.0}


@dataclass(frozen=True)
class Plan:
    """Contenders and what each of them has to do.

    Attributes:
        contenders: per kind of measurement those that take part; the full cache always does. Kinds are
            retrieval with the question ``inside`` the prompt, the same with the prompt read in chunks
            (``chunked``), with the question ``after`` the context was cut; ``forced``: likelihood of text;
            ``long``: a long answer.
        tasks: retrieval tasks.
        examples: per task.
        seeds: the examples are those of every seed.
        prompt_tokens: length of a prompt, or of what comes before the question.
        chunk_tokens: of ``chunked`` and ``forced``.
        forced_texts, forced_tokens: teacher forcing: how many texts, and how long.
        long_prompt_tokens, long_tokens: long generation.
        expect: what must hold of retrieval: ``kind``, ``contender`` and ``budget_percent``, and ``of_full``
            (lowest share of the full cache's mean), ``same_as_full`` (lowest share of answers that are the
            full cache's, word for word) or ``above`` (contenders of the same budget to beat).
    """

    name: str
    contenders: dict[str, tuple[Contender, ...]]
    tasks: tuple[str, ...]
    examples: int
    seeds: tuple[int, ...]
    prompt_tokens: int
    forced_texts: int
    forced_tokens: int
    chunk_tokens: int
    long_prompt_tokens: int
    long_tokens: int
    expect: tuple[dict[str, Any], ...] = ()


_KINDS = ("inside", "chunked", "after", "forced", "long")


def read(path: Path) -> Plan:
    """Read one file.

    Raises:
        PlanError: it isn't there, isn't YAML, or refers to what it doesn't define.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        policies, budgets = content.pop("policies"), content.pop("budgets_percent")
        contenders = {kind: _contenders(path, kind, policies, budgets.get(kind, {})) for kind in _KINDS}
        seeds, tasks = tuple(content.pop("seeds")), tuple(content.pop("tasks"))
        expect = tuple(content.pop("expect", ()))
        plan = Plan(path.stem, contenders, tasks, seeds=seeds, expect=expect, **content)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise PlanError(f"{path} can't be used: {error!r}") from error
    if unknown := set(plan.tasks) - set(TASKS):
        raise PlanError(f"{path} has unknown tasks {sorted(unknown)}; known: {', '.join(TASKS)}")
    if unknown := set(budgets) - set(_KINDS):
        raise PlanError(f"{path} has budgets for {sorted(unknown)}; known: {', '.join(_KINDS)}")
    return plan


def _contenders(
    path: Path, kind: str, policies: dict[str, Any], budgets: dict[str, list[int]]
) -> tuple[Contender, ...]:
    if not budgets:
        return ()
    if unknown := set(budgets) - set(policies):
        raise PlanError(f"{path} has budgets ({kind}) for {sorted(unknown)}, which it doesn't define")
    found = [Contender(FULL, None, 100)]
    for name, percents in budgets.items():
        found += [Contender(name, policies[name], percent) for percent in percents]
    return tuple(found)
