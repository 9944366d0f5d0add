"""What the peers' runs found: medians, a table, the result file. Standard library only."""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import machine
from peer_workload import Variant, Workload

Round = dict[str, dict[str, Any]]
"""Of one round: per label of a variant the figures that its peer printed."""

_MEDIANS = ("output_tokens_per_s", "prefill_s", "decode_tokens_per_s", "total_s", "peak_rss_bytes")


def medians(variants: list[Variant], rounds: list[Round]) -> dict[str, dict[str, float]]:
    """Per label over all rounds that have it, with the number of those as ``rounds``."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        runs = [r[variant.label] for r in rounds if variant.label in r]
        if runs:
            found[variant.label] = {
                **{figure: statistics.median(run[figure] for run in runs) for figure in _MEDIANS},
                "rounds": len(runs),
            }
    return found


def result(
    workload: Workload,
    variants: list[Variant],
    rounds_wanted: int,
    rounds: list[Round],
    failed: dict[str, str],
) -> dict[str, Any]:
    """All that the result file says.

    Args:
        failed: per label in one line why there are no figures of it, or fewer.
    """
    versions: dict[str, dict[str, str]] = {}
    for figures in (figures for r in rounds for figures in r.items()):
        versions[figures[0].partition(":")[0]] = figures[1]["versions"]
    counts = {variant.label: sum(variant.label in r for r in rounds) for variant in variants}
    return {
        "workload": workload.name,
        "description": workload.description,
        "complete": all(count == rounds_wanted for count in counts.values()),
        "date": date.today().isoformat(),
        "machine": machine.describe(),
        "versions": versions,
        "rounds_wanted": rounds_wanted,
        "failed": failed,
        "medians": medians(variants, rounds),
        "rounds": rounds,
    }


def table(workload: Workload, variants: list[Variant], found: dict[str, Any]) -> str:
    """A result as Markdown."""
    lines = [
        f"**{workload.name}**: {workload.description}",
        "",
        "| peer | KV cache | pool | batch | requests | output tok/s | prefill s | decode tok/s | RSS MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        m = found["medians"].get(variant.label)
        head = f"| {variant.peer} | {variant.method} | {variant.pool or '-'} "
        if m is None:
            state = "failed" if variant.label in found["failed"] else "not run"
            lines.append(f"{head}| - | - | {state} | | | |")
            continue
        runs = [r[variant.label] for r in found["rounds"] if variant.label in r]
        lines.append(
            f"{head}| {_batch(runs)} | {_requests(runs, workload)} | {m['output_tokens_per_s']:.1f} "
            f"| {m['prefill_s']:.1f} | {m['decode_tokens_per_s']:.1f} | {m['peak_rss_bytes'] / 2**20:.0f} |"
        )
    lines += ["", _footnote(found), ""]
    for peer, versions in found["versions"].items():
        lines.append(f"- {peer}: {', '.join(f'{name} {number}' for name, number in versions.items())}")
    lines += [f"- **failed**: {reason}" for reason in found["failed"].values()]
    if not found["complete"]:
        lines.append("- **not complete**: some figures are missing or of fewer rounds.")
    return "\n".join(lines) + "\n"


def _footnote(found: dict[str, Any]) -> str:
    threads = sorted({str(figures["threads"]) for r in found["rounds"] for figures in r.values()})
    return (
        "Output tok/s count the prefill in. Prefill lasts until every request has its first token, so where "
        "requests wait for room it holds other requests' decoding; decode tok/s are of the tokens after it. "
        "Static batches run one after another, and their times are added. A warm-up comes first and isn't "
        "counted. RSS is the most that the process had resident, model and pool included. "
        f"Medians of {_rounds(found)}; {', '.join(threads) or 'no'} threads; bfloat16; "
        f"{found['machine']}; {found['date']}."
    )


def _batch(runs: list[dict[str, Any]]) -> str:
    """The sizes that were run: 0 is continuous batching, and several when one was too much."""
    return ", ".join(str(size) if size else "continuous" for size in sorted({run["batch"] for run in runs}))


def _requests(runs: list[dict[str, Any]], workload: Workload) -> str:
    run = min(run["requests"] for run in runs)
    return str(run) if run == workload.requests else f"{run} of {workload.requests}"


def _rounds(found: dict[str, Any]) -> str:
    counts = sorted({int(m["rounds"]) for m in found["medians"].values()}) or [0]
    return "1 round" if counts == [1] else " to ".join(map(str, sorted({counts[0], counts[-1]}))) + " rounds"


def write(
    folder: Path, workload: Workload, variants: list[Variant], found: dict[str, Any]
) -> tuple[Path, Path]:
    """Write the result and its table; returns both paths. A kill leaves the old or the new one, whole."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {".json": json.dumps(found, indent=1) + "\n", ".md": table(workload, variants, found)}
    paths = []
    for suffix, text in contents.items():
        path = folder / f"{workload.name}{suffix}"
        scratch = path.with_name(f".{path.name}.new")
        scratch.write_text(text, encoding="utf-8")
        paths.append(scratch.replace(path))
    return paths[0], paths[1]
