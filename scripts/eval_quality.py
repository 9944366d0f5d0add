#!/usr/bin/env python3
"""What eviction costs in quality: policies side by side on a real model in a real engine.

    python3 scripts/eval_quality.py --quick                   # a few minutes
    python3 scripts/eval_quality.py                           # the full plan, under an hour
    python3 scripts/eval_quality.py --plan my.yaml --model path/to/another

A plan is a file of configs/quality. Engines run side by side. The result is written as they end:
scripts/results/quality/PLAN.json, with its tables (.md) and plots (.png) beside it. All texts and tasks are
generated from seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

# As a script this has only its own folder on the path.
sys.path.append(str(Path(__file__).resolve().parent / "quality"))

import fetch_model
import machine
import quality_pool
from model_store import StoreError
from setup_env import enter_environment
from setup_steps import OFFLINE_ENVIRONMENT, ROOT, SetupError

PLANS = ROOT / "configs" / "quality"
RESULTS = ROOT / "scripts" / "results" / "quality"


def run(plan_path: Path, model: Path, results: Path, processes: int) -> list[str]:
    """Run one plan; returns its expectations that don't hold."""
    # Not at the top: they need what the environment brings.
    import quality_report
    from quality_plan import read
    from quality_run import run as run_plan

    plan = read(plan_path)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{plan.name}.json"
    records: list[dict[str, Any]] = []
    found: dict[str, Any] = {
        "complete": False,
        "date": date.today().isoformat(),
        "machine": machine.describe(),
        "versions": {
            **{name: version(name) for name in ("vllm", "torch", "vllm-h2o")},
            "python": platform.python_version(),
        },
        "model": model.name,
        "records": records,
    }
    for record in run_plan(plan, model, processes):
        records.append(record)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    found["complete"] = True
    found["summary"] = quality_report.summary(plan, records)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = quality_report.table(plan, records)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    quality_report.plot(plan, records, path.with_suffix(".png"))
    print(f"\n{text}", flush=True)
    return list(quality_report.failures(plan, records))


def main() -> int:
    """Run the command line and return its exit status: 1 also when an expectation doesn't hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the plan `quick`")
    parser.add_argument("--plan", type=Path, default=PLANS / "full.yaml", help="default: %(default)s")
    parser.add_argument("--model", type=Path, help="folder of a model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is found")
    parser.add_argument(
        "--processes",
        type=int,
        default=min(len(quality_pool.cpus()), 4),
        help="engines at a time, which share the cores, 3 GB of memory each (default: %(default)s)",
    )
    options = parser.parse_args()
    if options.quick:
        options.plan = PLANS / "quick.yaml"
    try:
        enter_environment({"model", "bench"}, __file__)
        if options.model is None:
            options.model = fetch_model.DEFAULT_TARGET
            fetch_model.fetch(options.model)
        os.environ.update(OFFLINE_ENVIRONMENT)
        failed = run(options.plan, options.model, options.results, options.processes)
    except (SetupError, StoreError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; what was measured is kept.", file=sys.stderr)
        return 130
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
