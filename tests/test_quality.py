"""The quality test's own parts: tasks, prompts, figures, tables, expectations.

That engines are asked is shown by `scripts/eval_quality.py --quick`, which `.ci/run` runs.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import quality_report
from eval_quality import PLANS
from quality_plan import FULL, Contender, PlanError, read
from quality_prompt import PromptBuilder, PromptError
from quality_tasks import TASKS, examples
from tests.engines import MODEL

TEXT = """
policies:
  h2o: {name: h2o, recent: 0.1}
  random: {name: random}
budgets_percent:
  inside: {h2o: [20, 100], random: [20]}
tasks: [needle_single, key_value]
examples: 2
seeds: [0, 1]
prompt_tokens: 640
forced_texts: 1
forced_tokens: 512
chunk_tokens: 256
long_prompt_tokens: 64
long_tokens: 128
expect:
  - {kind: inside, contender: h2o, budget_percent: 20, of_full: 0.5, above: [random]}
  - {kind: inside, contender: h2o, budget_percent: 100, same_as_full: 0.5}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder(AutoTokenizer.from_pretrained(MODEL))


# --- tasks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_the_right_answer_scores_and_others_do_not(task: str) -> None:
    for example in examples(task, 5, seed=3):
        assert example.task == task
        assert example.score(" and ".join(example.answers).upper()) == 1.0
        assert example.score("I don't know.") == 0.0
        assert example.score(example.answers[0]) == pytest.approx(1 / len(example.answers))
        # The answer has to be found, not guessed from the question.
        for answer in example.answers:
            assert answer not in example.question + example.answer_start
        told = example.system + example.instruction + "".join(text for _, text in example.facts)
        assert all(answer in told for answer in example.answers)
        assert list(example.facts) == sorted(example.facts, key=lambda fact: fact[0])


@pytest.mark.parametrize("task", TASKS)
def test_examples_are_the_same_for_a_seed_and_differ_between_seeds(task: str) -> None:
    assert list(examples(task, 4, seed=0)) == list(examples(task, 4, seed=0))
    assert list(examples(task, 4, seed=0)) != list(examples(task, 4, seed=1))


def test_depths_are_swept() -> None:
    assert [example.facts[0][0] for example in examples("needle_single", 5, seed=0)] == [
        0,
        0.25,
        0.5,
        0.75,
        1,
    ]


def test_often_is_really_more_often() -> None:
    (example,) = examples("common_words", 1, seed=0)
    words = [text.split()[-1] for _, text in example.facts]
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert {word for _, word in counts[:3]} == set(example.answers)
    assert counts[2][0] > counts[3][0]
    (example,) = examples("frequent_words", 1, seed=0)
    words = [text.strip() for _, text in example.facts]
    assert max(set(words), key=words.count) == example.answers[0]


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("num_tokens", [640, 1001])
def test_prompts_are_of_the_exact_length(task: str, num_tokens: int, builder: PromptBuilder) -> None:
    for number, example in enumerate(examples(task, 4, seed=0)):
        draw = random.Random(number)
        ids = builder.build(example, num_tokens, question_after=False, draw=draw)
        assert len(ids) == num_tokens
        after = builder.build(example, num_tokens, question_after=True, draw=draw)
        text = builder.tokenizer.decode(after[num_tokens:])
        # The question, all of it, and nothing of the context.
        assert text.startswith(example.question.strip("\n")) or text.startswith(example.question)
        assert text.endswith(example.answer_start)
        for answer in example.answers:
            assert answer in builder.tokenizer.decode(after[:num_tokens])


def test_facts_are_where_they_should_be(builder: PromptBuilder) -> None:
    for depth in (0.0, 0.3, 0.7, 1.0):
        (example,) = examples("needle_single", 1, seed=0)
        moved = replace(example, facts=((depth, example.facts[0][1]),))
        ids = builder.build(moved, 1000, question_after=True, draw=random.Random(1))
        text = builder.tokenizer.decode(ids[:1000])
        before = len(builder.tokenizer.encode(text[: text.index(example.answers[0])]))
        assert before / 1000 == pytest.approx(depth, abs=0.12)


def test_facts_do_not_tear_sentences_apart(builder: PromptBuilder) -> None:
    (example,) = examples("needle_noise", 1, seed=0)
    for depth in (0.2, 0.5, 0.8):
        moved = replace(example, facts=((depth, example.facts[0][1]),))
        ids = builder.build(moved, 800, question_after=False, draw=random.Random(2))
        text = builder.tokenizer.decode(ids)
        assert text[: text.index(" The special")].endswith(".")


def test_a_prompt_that_cannot_hold_its_facts_is_refused(builder: PromptBuilder) -> None:
    (example,) = examples("key_value", 1, seed=0)
    with pytest.raises(PromptError, match=r"key_value needs \d+ tokens, the prompt has 100"):
        builder.build(example, 100, question_after=False, draw=random.Random(0))


# --- plans ---------------------------------------------------------------------------------------


def test_the_full_cache_always_takes_part(path: Path) -> None:
    plan = read(path)
    labels = [contender.label for contender in plan.contenders["inside"]]
    assert labels == [FULL, "h2o, 20 %", "h2o, 100 %", "random, 20 %"]
    assert plan.contenders["after"] == ()


def test_budgets_are_shares_of_the_sequence(path: Path) -> None:
    _, fifth, whole, _ = read(path).contenders["inside"]
    assert fifth.policy(1000) == {"name": "h2o", "recent": 0.1, "budget": 200}
    assert whole.policy(1000) == {"name": "h2o", "recent": 0.1, "budget": 1.0}
    assert Contender(FULL, None, 100).policy(1000) is None


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_can_be_read(plan: Path) -> None:
    read(plan)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("needle_single", "needle_double", "unknown tasks"),
        ("random: [20]", "chance: [20]", "doesn't define"),
        ("inside:", "outside:", "known: inside"),
        ("examples: 2", "samples: 2", "can't be used"),
        ("policies:", "policies: [", "can't be used"),
    ],
)
def test_mistakes_are_named(path: Path, old: str, new: str, message: str) -> None:
    path.write_text(TEXT.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(PlanError, match=message):
        read(path)


# --- figures -------------------------------------------------------------------------------------


def record(contender: str, percent: int, single: list[float], key_value: list[float]) -> dict[str, Any]:
    scores = {"needle_single": single, "key_value": key_value}
    return {
        "kind": "inside",
        "contender": contender,
        "budget_percent": percent,
        "scores": scores,
        "same_answer_as_full": 0.5,
    }


RECORDS = [
    record(FULL, 100, [1, 1, 1, 1], [0, 0, 0, 1]),
    record("h2o", 20, [1, 1, 0, 1], [0, 0, 0, 0]),
    record("h2o", 100, [1, 1, 1, 1], [0, 0, 0, 1]),
    record("random", 20, [0, 0, 0, 1], [1, 1, 1, 1]),
]


def test_means_are_of_tasks_that_the_full_cache_solves(path: Path) -> None:
    found = quality_report.summary(read(path), RECORDS)
    assert [s["mean"] for s in found] == [1.0, 0.75, 1.0, 0.25]
    assert [s["of_full"] for s in found] == [1.0, 0.75, 1.0, 0.25]
    assert all(s["tasks"] == ["needle_single"] for s in found)
    assert found[1]["low"] < 0.75 < found[1]["high"]


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw = random.Random(5)
    hits = 0
    for trial in range(200):
        values = [float(draw.random() < 0.7) for _ in range(40)]
        low, high = quality_report.interval(values, seed=trial)
        hits += low <= 0.7 <= high
    assert 175 <= hits <= 200


def test_the_table_marks_what_says_nothing(path: Path) -> None:
    text = quality_report.table(read(path), RECORDS)
    assert "| policy | budget | mean (95 %) | needle_single | as full |" in text
    assert "| h2o | 20 % | **0.75** (" in text
    assert "solves too few with a full cache: key_value 0.25" in text


def test_expectations(path: Path) -> None:
    plan = read(path)
    assert list(quality_report.failures(plan, RECORDS)) == []
    other_words = {**RECORDS[2], "same_answer_as_full": 0.25}
    worse = [RECORDS[0], record("h2o", 20, [0, 0, 0, 1], [0] * 4), other_words, RECORDS[3]]
    assert list(quality_report.failures(plan, worse)) == [
        "inside: h2o at 20 % reaches 0.25 of full, not 0.5",
        "inside: h2o at 20 % has 0.25, random 0.25",
        "inside: h2o at 100 % answers word for word as full in 0.25, not 0.5",
    ]
    assert list(quality_report.failures(plan, [RECORDS[0]])) == [
        "inside: h2o at 20 % was not measured",
        "inside: h2o at 100 % was not measured",
    ]


def test_kl_by_hand() -> None:
    from quality_engine import Forced

    def forced(*shares: float) -> Forced:
        return Forced([0.0], [{token: math.log(share) for token, share in enumerate(shares)}])

    same = forced(0.5, 0.25)
    assert same.kl_from(forced(0.5, 0.25)) == pytest.approx([0.0])
    # 0.5 ln(0.5 / 0.25) + 0.25 ln(0.25 / 0.5) + 0.25 ln(0.25 / 0.25)
    assert forced(0.25, 0.5).kl_from(same) == pytest.approx([0.25 * math.log(2)])
    assert forced(0.25, 0.5).top1_agreement(same) == 0.0
    assert same.top1_agreement(same) == 1.0
