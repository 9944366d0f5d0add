"""Runs the contenders of a plan, each in an engine of its own, and collects plain figures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

import quality_pool
import quality_report
from quality_engine import BLOCK_TOKENS, Forced, answers, continuation, engine, teacher_forced
from quality_plan import Contender, Plan
from quality_prompt import PromptBuilder
from quality_tasks import Example, examples

Record = dict[str, Any]

_ANSWER_TOKENS = 64  # the longest answer of any task, and the question behind a context
_NGRAM = 4


def run(plan: Plan, model: Path, processes: int) -> Iterator[Record]:
    """All measurements, one record per contender and kind; the full caches, which others refer to, first."""
    kinds = [kind for kind in _MEASURES if plan.contenders[kind]]
    with quality_pool.pool(processes) as executor:
        first = [executor.submit(_measure, plan, model, kind, plan.contenders[kind][0], {}) for kind in kinds]
        others = []
        for kind, future in zip(kinds, first, strict=True):
            full = future.result()
            yield _public(full)
            others += [
                executor.submit(_measure, plan, model, kind, contender, full)
                for contender in plan.contenders[kind][1:]
            ]
        for future in others:
            yield _public(future.result())


def _measure(plan: Plan, model: Path, kind: str, contender: Contender, full: Record) -> Record:
    print(f"{kind}: {contender.label}", flush=True)
    builder = PromptBuilder(AutoTokenizer.from_pretrained(model))
    record = {"kind": kind, "contender": contender.name, "budget_percent": contender.budget_percent}
    return record | _MEASURES[kind](plan, model, builder, contender, full)


def _public(record: Record) -> Record:
    return {name: value for name, value in record.items() if not name.startswith("_")}


def _inside(plan: Plan, model: Path, builder: PromptBuilder, contender: Contender, full: Record) -> Record:
    return _retrieval(plan, model, builder, contender, full, plan.prompt_tokens, question_after=False)


def _chunked(plan: Plan, model: Path, builder: PromptBuilder, contender: Contender, full: Record) -> Record:
    return _retrieval(plan, model, builder, contender, full, plan.chunk_tokens, question_after=False)


def _after(plan: Plan, model: Path, builder: PromptBuilder, contender: Contender, full: Record) -> Record:
    return _retrieval(plan, model, builder, contender, full, plan.prompt_tokens, question_after=True)


def _retrieval(
    plan: Plan,
    model: Path,
    builder: PromptBuilder,
    contender: Contender,
    full: Record,
    chunk_tokens: int,
    *,
    question_after: bool,
) -> Record:
    """Scores of the tasks that the full cache solves. A question that comes after has a chunk of its own."""
    tasks = quality_report.solved_tasks(full) if full else plan.tasks
    asked: list[Example] = [
        example for task in tasks for seed in plan.seeds for example in examples(task, plan.examples, seed)
    ]
    prompts = [
        builder.build(
            example,
            plan.prompt_tokens,
            question_after=question_after,
            draw=random.Random(f"{example.task} {example.facts}"),
        )
        for example in asked
    ]
    longest = max(map(len, prompts)) + _ANSWER_TOKENS
    policy = contender.policy(plan.prompt_tokens)
    with engine(model, policy, max_model_len=longest, chunk_tokens=chunk_tokens) as llm:
        texts = answers(llm, prompts, [example.max_tokens for example in asked])
    by_example = dict(zip(asked, texts, strict=True))
    scores: dict[str, list[float]] = {task: [] for task in tasks}
    for example, text in by_example.items():
        scores[example.task].append(example.score(text))
    reference: dict[Example, str] = full.get("_texts", by_example)
    same = [text == reference[example] for example, text in by_example.items()]
    return {"scores": scores, "same_answer_as_full": sum(same) / len(same), "_texts": by_example}


def _forced(plan: Plan, model: Path, builder: PromptBuilder, contender: Contender, full: Record) -> Record:
    """Likelihood of natural text, read in chunks, and how far predictions are from the full cache's."""
    texts = [builder.text_ids(plan.forced_tokens, which) for which in range(plan.forced_texts)]
    length = plan.forced_tokens + BLOCK_TOKENS
    policy = contender.policy(plan.forced_tokens)
    with engine(model, policy, max_model_len=length, chunk_tokens=plan.chunk_tokens) as llm:
        forced = [teacher_forced(llm, ids) for ids in texts]
        greedy = [continuation(llm, ids[: plan.forced_tokens // 2], 64) for ids in texts]
    reference: list[Forced] = full.get("_forced", forced)
    quarter = plan.forced_tokens // 4
    positions = [slice(i * quarter, (i + 1) * quarter) for i in range(4)]
    return {
        "nll": [sum(f.nll) / len(f.nll) for f in forced],
        "nll_of_quarters": [
            sum(sum(f.nll[part]) / len(f.nll[part]) for f in forced) / len(forced) for part in positions
        ],
        "kl": [sum(kl) / len(kl) for f, r in zip(forced, reference, strict=True) for kl in [f.kl_from(r)]],
        "top1_agreement": [f.top1_agreement(r) for f, r in zip(forced, reference, strict=True)],
        "first_divergence_tokens": [
            _first_difference(a, b) for a, b in zip(greedy, full.get("_greedy", greedy), strict=True)
        ],
        "_forced": forced,
        "_greedy": greedy,
    }


def _long(plan: Plan, model: Path, builder: PromptBuilder, contender: Contender, full: Record) -> Record:
    """A long answer: does it repeat itself, and which positions are still there at the end."""
    prompt = builder.text_ids(plan.long_prompt_tokens, which=7)
    length = plan.long_prompt_tokens + plan.long_tokens
    policy = contender.policy(length)
    trace = policy is not None
    with engine(model, policy, max_model_len=length + BLOCK_TOKENS, chunk_tokens=1024, trace=trace) as llm:
        ids = continuation(llm, prompt, plan.long_tokens, temperature=0.7, seed=None)
        kept = _kept_at_the_end(llm) if trace else []
    grams = Counter(tuple(ids[i : i + _NGRAM]) for i in range(len(ids) - _NGRAM + 1))
    return {
        "repeated_4grams": 1 - len(grams) / grams.total(),
        "kept_per_tenth": _histogram(kept, length),
    }


def _kept_at_the_end(llm: Any) -> list[int]:
    """Positions that were left by the last compaction, of all layers and heads together."""
    ((trace,),) = llm.collective_rpc("take_kv_trace")
    last = max(step for step, *_ in trace["kept"])
    return [
        position
        for step, _, heads, _ in trace["kept"]
        if step == last
        for positions in heads
        for position in positions
    ]


def _histogram(positions: list[int], length: int) -> list[float]:
    """Share of the positions in each tenth of the sequence."""
    counts = Counter(min(9, position * 10 // length) for position in positions)
    return [counts[tenth] / len(positions) for tenth in range(10)] if positions else []


def _first_difference(ids: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(ids, other, strict=True)) if a != b), len(ids))


_MEASURES: dict[str, Callable[[Plan, Path, PromptBuilder, Contender, Record], Record]] = {
    "inside": _inside,
    "chunked": _chunked,
    "after": _after,
    "forced": _forced,
    "long": _long,
}
