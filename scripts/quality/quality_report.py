"""What quality tests found: means with confidence intervals, tables and plots."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quality_plan import FULL, Plan

Record = dict[str, Any]

_RESAMPLES = 2000
_CHANCE = 0.5
"""Tasks that the full cache itself solves less often say nothing about policies."""


_TITLES = {
    "inside": "Question in the prompt",
    "chunked": "Question in the prompt, which is read and cut in chunks",
    "after": "Question after the context was cut",
}


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of the mean."""
    draw = random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return means[round(0.025 * (_RESAMPLES - 1))], means[round(0.975 * (_RESAMPLES - 1))]


_OF_RECORD = ("kind", "contender", "budget_percent", "same_answer_as_full")


def solved_tasks(full: Record) -> tuple[str, ...]:
    """Tasks that the full cache solves; only those are asked of policies."""
    return tuple(task for task, scores in full["scores"].items() if statistics.fmean(scores) >= _CHANCE)


def retrieval_mean(record: Record, tasks: Sequence[str]) -> tuple[float, tuple[float, float]]:
    """Mean over all examples of the tasks, and its interval."""
    values = [score for task in tasks for score in record["scores"][task]]
    return statistics.fmean(values), interval(values)


def summary(plan: Plan, records: Sequence[Record]) -> list[Record]:
    """Per retrieval record its mean over usable tasks, and that relative to the full cache."""
    found = []
    for kind in _TITLES:
        of_kind = [r for r in records if r["kind"] == kind]
        tasks = solved_tasks(of_kind[0]) if of_kind else ()
        for record in of_kind if tasks else ():
            mean, (low, high) = retrieval_mean(record, tasks)
            full, _ = retrieval_mean(of_kind[0], tasks)
            found.append(
                {
                    **{name: record[name] for name in _OF_RECORD},
                    "tasks": list(tasks),
                    "mean": mean,
                    "low": low,
                    "high": high,
                    "of_full": mean / full,
                }
            )
    return found


def table(plan: Plan, records: Sequence[Record]) -> str:
    """Everything as Markdown."""
    return "\n".join([*_retrieval_tables(plan, records), *_forced_table(records), *_long_table(records)])


def _label(record: Record) -> str:
    return FULL if record["contender"] == FULL else f"{record['contender']} | {record['budget_percent']} %"


def _retrieval_tables(plan: Plan, records: Sequence[Record]) -> Iterator[str]:
    means = {(s["kind"], s["contender"], s["budget_percent"]): s for s in summary(plan, records)}
    for kind, title in _TITLES.items():
        of_kind = [r for r in records if r["kind"] == kind]
        if not of_kind:
            continue
        solved = solved_tasks(of_kind[0])
        count = plan.examples * len(plan.seeds)
        yield f"**{title}** (prompts of {plan.prompt_tokens:,} tokens, {count} examples per task)\n"
        yield f"| policy | budget | mean (95 %) | {' | '.join(solved)} | as full |"
        yield "|" + "---|" * (4 + len(solved))
        for record in of_kind:
            found = means.get((kind, record["contender"], record["budget_percent"]))
            mean = f"**{found['mean']:.2f}** ({found['low']:.2f}-{found['high']:.2f})" if found else "-"
            cells = [f"{statistics.fmean(record['scores'][task]):.2f}" for task in solved]
            cells.append(f"{record['same_answer_as_full']:.0%}")
            label = _label(record) + (" | " if record["contender"] == FULL else "")
            yield f"| {label} | {mean} | {' | '.join(cells)} |"
        unsolved = [
            f"{task} {statistics.fmean(scores):.2f}"
            for task, scores in of_kind[0]["scores"].items()
            if task not in solved
        ]
        yield "\n`as full`: share of answers that are the full cache's, word for word."
        if unsolved:
            yield f"Not asked, because this model solves too few with a full cache: {', '.join(unsolved)}."
        yield ""


def _forced_table(records: Sequence[Record]) -> Iterator[str]:
    forced = [r for r in records if r["kind"] == "forced"]
    if not forced:
        return
    full = statistics.fmean(forced[0]["nll"])
    yield "**Natural text, read in chunks** (likelihood per token; the cache is cut after every chunk)\n"
    yield "| policy | budget | NLL | rise | last quarter | KL | same likeliest token | first difference |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in forced:
        nll = statistics.fmean(record["nll"])
        label = _label(record) + (" | " if record["contender"] == FULL else "")
        yield (
            f"| {label} | {nll:.3f} | {nll / full - 1:+.1%} | {record['nll_of_quarters'][-1]:.3f} "
            f"| {statistics.fmean(record['kl']):.3f} | {statistics.fmean(record['top1_agreement']):.1%} "
            f"| {statistics.fmean(record['first_divergence_tokens']):.0f} tokens |"
        )
    yield ""


def _long_table(records: Sequence[Record]) -> Iterator[str]:
    long = [r for r in records if r["kind"] == "long"]
    if not long:
        return
    yield "**A long answer** (repeated 4-grams; what is kept at the end, per tenth of the sequence)\n"
    yield "| policy | budget | repeated | kept, oldest to newest |"
    yield "|---|---|---|---|"
    for record in long:
        label = _label(record) + (" | " if record["contender"] == FULL else "")
        kept = " ".join(f"{share:.0%}" for share in record["kept_per_tenth"]) or "all"
        yield f"| {label} | {record['repeated_4grams']:.0%} | {kept} |"
    yield ""


def plot(plan: Plan, records: Sequence[Record], path: Path) -> None:
    """Retrieval against the budget, and the rise of NLL."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = summary(plan, records)
    kinds = list(dict.fromkeys(s["kind"] for s in found))
    figure, axes = plt.subplots(
        1, len(kinds) + 1, figsize=(5.5 * len(kinds) + 5.5, 4.5), layout="constrained"
    )
    for axis, kind in zip(axes, kinds, strict=False):
        of_kind = [s for s in found if s["kind"] == kind]
        names = dict.fromkeys(s["contender"] for s in of_kind if s["contender"] != FULL)
        for name in names:
            points = sorted(
                (s["budget_percent"], s["mean"], s["low"], s["high"])
                for s in of_kind
                if s["contender"] == name
            )
            percents, means, lows, highs = zip(*points, strict=True)
            errors = [
                [m - low for m, low in zip(means, lows, strict=True)],
                [high - m for m, high in zip(means, highs, strict=True)],
            ]
            axis.errorbar(percents, means, yerr=errors, marker="o", capsize=3, label=name)
        for s in of_kind:
            if s["contender"] == FULL:
                axis.axhline(s["mean"], color="black", linestyle=":", label=FULL)
        axis.set(
            title=_TITLES[kind], xlabel="budget, % of the prompt", ylim=(0, 1.05), ylabel="answers found"
        )
        if names:
            axis.legend(fontsize="small")
    forced = [r for r in records if r["kind"] == "forced"]
    if forced:
        full = statistics.fmean(forced[0]["nll"])
        labels = [f"{r['contender']}, {r['budget_percent']} %" for r in forced[1:]]
        rises = [100 * (statistics.fmean(r["nll"]) / full - 1) for r in forced[1:]]
        axes[-1].barh(labels[::-1], rises[::-1])
        axes[-1].set(title="natural text: rise of NLL, %")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def failures(plan: Plan, records: Sequence[Record]) -> Iterator[str]:
    """One line for each expectation of the plan that doesn't hold."""
    found = {(s["kind"], s["contender"], s["budget_percent"]): s for s in summary(plan, records)}
    for floor in plan.expect:
        kind, name, percent = floor["kind"], floor["contender"], floor["budget_percent"]
        got = found.get((kind, name, percent))
        if got is None:
            yield f"{kind}: {name} at {percent} % was not measured"
            continue
        if got["of_full"] < floor.get("of_full", 0):
            reached = f"reaches {got['of_full']:.2f} of full, not {floor['of_full']}"
            yield f"{kind}: {name} at {percent} % {reached}"
        if got["same_answer_as_full"] < floor.get("same_as_full", 0):
            reached = f"{got['same_answer_as_full']:.2f}, not {floor['same_as_full']}"
            yield f"{kind}: {name} at {percent} % answers word for word as full in {reached}"
        for other in floor.get("above", ()):
            theirs = found.get((kind, other, percent))
            if theirs is None or got["mean"] <= theirs["mean"]:
                reached = "nothing" if theirs is None else f"{theirs['mean']:.2f}"
                yield f"{kind}: {name} at {percent} % has {got['mean']:.2f}, {other} {reached}"
