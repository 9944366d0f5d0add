"""What load tests found: medians, ratios of runs next to each other, a table and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load_workload import Workload

THROUGHPUT = "output_throughput"

Round = dict[str, dict[str, dict[str, Any]]]
"""Of one round: per variant and load the figures of ``load_run.run_variant``."""


def summary(workload: Workload, rounds: list[Round]) -> dict[str, Any]:
    """Medians per variant and load over all rounds, and ratios per comparison and load.

    A round that was cut counts for the variants that it has, and for the ratios whose two it has.
    """
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for variant in workload.variants:
        for load in workload.loads:
            runs = [r[variant][load] for r in rounds if variant in r]
            if runs:
                medians.setdefault(variant, {})[load] = {
                    figure: statistics.median(run[figure] for run in runs) for figure in runs[0]
                }
    ratios: dict[str, dict[str, dict[str, Any]]] = {}
    for comparison in workload.comparisons:
        both = [r for r in rounds if comparison.of in r and comparison.to in r]
        for load in workload.loads if both else ():
            figures: dict[str, Any] = {}
            for figure in (THROUGHPUT, "median_ttft_ms", "median_tpot_ms"):
                of_rounds = [
                    r[comparison.of][load][figure] / r[comparison.to][load][figure]
                    for r in both
                    if r[comparison.to][load].get(figure)
                ]
                if of_rounds:
                    figures[figure] = statistics.median(of_rounds)
                    figures[f"{figure}_of_rounds"] = of_rounds
            ratios.setdefault(load, {})[comparison.name] = figures
    return {"medians": medians, "ratios": ratios}


def too_slow(workload: Workload, found: dict[str, Any]) -> Iterator[str]:
    """One line for each ratio of output tokens/s below the workload's floor."""
    for load, floors in workload.floors.items():
        for name, floor in floors.items():
            ratio = found["ratios"].get(load, {}).get(name, {}).get(THROUGHPUT)
            if ratio is None:
                yield f"{load}, {name}: not measured, floor {floor}"
            elif ratio < floor:
                yield f"{load}, {name}: {ratio:.2f} is under the floor of {floor}"


def table(workload: Workload, found: dict[str, Any]) -> str:
    """The medians and ratios as Markdown."""
    lines = [
        f"**{workload.name}**: {workload.description}",
        "",
        "| load | server | output tok/s | TTFT ms | TPOT ms | ITL p99 ms | running | preemptions | KV use "
        "| prompt tokens computed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for load in workload.loads:
        for variant, loads in found["medians"].items():
            m = loads[load]
            lines.append(
                f"| {load} | {variant} | {m[THROUGHPUT]:.1f} | {m['median_ttft_ms']:.0f} "
                f"| {m['median_tpot_ms']:.1f} | {m['p99_itl_ms']:.0f} | {m['peak_running']:.0f} "
                f"| {m['preemptions']:.0f} | {m['peak_kv_usage']:.0%} "
                # Not counted by earlier runs.
                f"| {_tokens(m.get('computed_prompt_tokens'))} |"
            )
    lines.append("")
    for load, comparisons in found["ratios"].items():
        for name, figures in comparisons.items():
            per_round = ", ".join(f"{ratio:.2f}" for ratio in figures[f"{THROUGHPUT}_of_rounds"])
            extra = "".join(
                f"; {label} {figures[figure]:.2f}"
                for label, figure in (("TTFT", "median_ttft_ms"), ("TPOT", "median_tpot_ms"))
                if figure in figures
            )
            lines.append(f"- {load}, {name}: output tok/s **{figures[THROUGHPUT]:.2f}** ({per_round}){extra}")
    return "\n".join(lines) + "\n"


def _tokens(count: float | None) -> str:
    return "-" if count is None else f"{count:,.0f}"


def plot(workload: Workload, found: dict[str, Any], path: Path) -> None:
    """Output tok/s and time per output token of every server and load, as grouped bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    variants, loads = list(found["medians"]), list(workload.loads)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    panels = ((THROUGHPUT, "output tokens/s"), ("median_tpot_ms", "median time per output token, ms"))
    for axis, (name, label) in zip(axes, panels, strict=True):
        for i, variant in enumerate(variants):
            offsets = [x + (i + 0.5) * 0.8 / len(variants) - 0.4 for x in range(len(loads))]
            heights = [found["medians"][variant][load].get(name, 0.0) for load in loads]
            axis.bar(offsets, heights, 0.8 / len(variants), label=variant)
        axis.set_xticks(range(len(loads)), loads)
        axis.set_ylabel(label)
    axes[0].legend(fontsize="small")
    figure.suptitle(f"{workload.name}: {workload.description}")
    figure.savefig(path, dpi=120)
    plt.close(figure)
