"""ROUGE of one summary; lm-eval loads this file beside xsum.yaml."""

from __future__ import annotations

from typing import Any

from rouge_score import rouge_scorer

_METRICS = ("rouge1", "rougeL")


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """F-measures, 0 to 1, of the answer against the document's summary."""
    scores = rouge_scorer.RougeScorer(list(_METRICS), use_stemmer=True).score(doc["summary"], results[0])
    return {name: scores[name].fmeasure for name in _METRICS}
