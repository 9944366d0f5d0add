#!/usr/bin/env python3
"""Compares the cost model of docs/cost-model.md with what was measured, as a table and a plot.

    python scripts/cost_model.py

Reads scripts/results/kernels.json and scripts/results/load/w2-long-context.json, writes docs/cost-model.png
and prints the table. The median time between tokens of plain vLLM over the context gives `w` and `a` by least
squares; the kernels' times give `s` and `m`; together they predict the time with a policy, which is then
compared. (Not the time per output token: it holds the waiting for other requests' prompts.)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from load_workload import read as read_workload
from setup_steps import ROOT

LAYERS, BLOCK_TOKENS, BUDGET_TOKENS, MAX_MODEL_LEN = 30, 32, 1664, 8192
Floats = npt.NDArray[np.float64]

SCORED = ("score a block of 8 rows, 2,048 live", 8 * BLOCK_TOKENS * 2048)
DROPPED = ("drop a block of 8 rows, 544 live", 8 * BLOCK_TOKENS)


def live_tokens(context: Floats) -> Floats:
    """Tokens whose KV a request holds on average at some context."""
    return np.where(context < BUDGET_TOKENS, context, BUDGET_TOKENS - BLOCK_TOKENS / 2)


def main() -> int:
    results = ROOT / "scripts" / "results"
    kernels = json.loads((results / "kernels.json").read_text(encoding="utf-8"))["results"]["bfloat16"]
    load = json.loads((results / "load" / "w2-long-context.json").read_text(encoding="utf-8"))
    workload = read_workload(ROOT / "configs" / "load" / "w2-long-context.yaml")
    batch = next(iter(workload.loads.values()))["num-prompts"]
    context = np.array(
        [flags["random-input-len"] + flags["random-output-len"] / 2 for flags in workload.loads.values()]
    )
    measured = {
        variant: np.array([load["medians"][variant][name]["median_itl_ms"] for name in workload.loads])
        for variant in ("plain", "h2o")
    }
    slope, base = np.polyfit(context, measured["plain"], 1)
    per_live = LAYERS * kernels[SCORED[0]]["native_ms"] / SCORED[1]
    per_token = LAYERS * kernels[DROPPED[0]]["native_ms"] / DROPPED[1]

    def predicted(at: Floats) -> Floats:
        live = live_tokens(at)
        return base + slope * live + batch * (per_live * live + np.where(at < BUDGET_TOKENS, 0, per_token))

    print(f"w = {base:.1f} ms; b a = {1e3 * slope:.2f} us a token of context; ", end="")
    print(f"b s = {1e3 * batch * per_live:.2f} us a live token; b m = {batch * per_token:.2f} ms\n")
    print("| context | plain, ms | model | h2o, ms | model |\n|---|---|---|---|---|")
    modelled = {"plain": base + slope * context, "h2o": predicted(context)}
    rows = zip(context, *(source[name] for name in measured for source in (measured, modelled)), strict=True)
    for at, plain, plain_model, h2o, h2o_model in rows:
        print(f"| {at:.0f} | {plain:.0f} | {plain_model:.0f} | {h2o:.0f} | {h2o_model:.0f} |")
    every: Floats = np.arange(64, MAX_MODEL_LEN).astype(np.float64)
    lines = {"plain": base + slope * every, "h2o": predicted(every)}
    _plot(context, measured, every, lines, ROOT / "docs" / "cost-model.png")
    return 0


def _plot(
    context: Floats, measured: dict[str, Floats], every: Floats, lines: dict[str, Floats], path: Path
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (name, label) in enumerate((("plain", "plain vLLM"), ("h2o", f"h2o, budget {BUDGET_TOKENS}"))):
        axis.plot(every, lines[name], f"C{color}-", label=f"{label}, model")
        axis.plot(context, measured[name], f"C{color}o", label=f"{label}, measured")
    axis.set(xlabel="context, tokens", ylabel="median time between tokens, ms", ylim=(0, None))
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
