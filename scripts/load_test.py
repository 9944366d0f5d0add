#!/usr/bin/env python3
"""Load tests of vLLM with and without a KV policy, side by side.

    python3 scripts/load_test.py --quick                  # a few minutes
    python3 scripts/load_test.py w1-short-pool w4-reasoning --rounds 5
    python3 scripts/load_test.py w1-short-pool --add      # go on from a run that was cut
    python3 scripts/load_test.py --all

A workload is a file of configs/load. In every round each of its servers is started, gets all loads from
`vllm bench serve`, and is stopped, so that ratios are of runs next to each other. The result is written after
every server: scripts/results/load/WORKLOAD.json, with a table (.md) and a plot (.png) beside it. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

import fetch_model
from model_store import StoreError
from server_process import ServerError
from setup_env import enter_environment
from setup_steps import ROOT, SetupError

CONFIGS = ROOT / "configs" / "load"
RESULTS = ROOT / "scripts" / "results" / "load"
ROUNDS_TO_FAIL = 3


def run(path: Path, options: argparse.Namespace) -> list[str]:
    """Run one workload file; returns what is slower than its floors allow."""
    # Not at the top: they need what the environment brings.
    import load_report
    from load_results import Results
    from load_run import run_variant
    from load_workload import read

    workload = read(path)
    results = Results(workload, options.results, options.rounds)
    if options.add:
        results.load()

    def measure() -> list[str]:
        missing = results.missing_rounds()
        for number in range(missing):
            results.start_round()
            for variant in workload.variants:
                print(f"\n{workload.name}: round {number + 1} of {missing}, server {variant}", flush=True)
                log_path = ROOT / "logs" / f"load-{workload.name}-{variant}.log"
                results.add(variant, run_variant(workload, variant, fetch_model.DEFAULT_TARGET, log_path))
            results.plot()
        print(f"\n{results.table()}", flush=True)
        return list(load_report.too_slow(workload, results.found()))

    slow = measure()
    if slow and options.rounds < ROUNDS_TO_FAIL:
        # One round can be slow because of what else the machine does.
        print(f"{'; '.join(slow)}: measured again, the median of {ROUNDS_TO_FAIL} rounds counts", flush=True)
        results.want_rounds(ROUNDS_TO_FAIL)
        slow = measure()
    return slow


def _exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # through the normal way out, which stops the server


def main() -> int:
    """Run the command line and return its exit status: 1 also when a ratio is under its floor."""
    known = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of: {', '.join(known)}")
    parser.add_argument("--all", action="store_true", help="all of them (hours)")
    parser.add_argument("--quick", action="store_true", help="one round of the workload `quick`, or three")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--add", action="store_true", help="add the rounds that the results' folder lacks")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for what is found")
    options = parser.parse_args()
    names = ["quick"] if options.quick else known if options.all else options.workloads
    if not names or options.rounds < 1:
        parser.error("name workloads, or give --quick or --all; --rounds must be at least 1")
    for name in names:
        if name not in known:
            parser.error(f"there is no workload {name!r}; known: {', '.join(known)}")
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        enter_environment({"model", "bench"}, __file__)
        fetch_model.fetch(fetch_model.DEFAULT_TARGET)
        if options.quick:
            options.rounds = 1
        slow = [line for name in names for line in run(CONFIGS / f"{name}.yaml", options)]
    except (SetupError, StoreError, ServerError, ValueError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; the server is stopped, and what was measured is kept.", file=sys.stderr)
        return 130
    for line in slow:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
