#!/usr/bin/env python3
"""Runs one workload on this plugin and on its peers, for one table.

    python3 scripts/peers/run_peers.py --quick                 # does everything work? (tiny, minutes)
    python3 scripts/peers/run_peers.py --workload w1 --rounds 3
    python3 scripts/peers/run_peers.py --workload w4 --peers vllm,h2o,openvino
    python3 scripts/peers/run_peers.py --workload w3 --requests 4   # fewer for the slow ones

hf is Hugging Face Transformers with a full cache, kvpress and openvino have evictions of their own, vllm is
plain vLLM and h2o the plugin. vllm and h2o run in `.venv`; each other peer gets an environment of its own in
`.cache/peers` (about 1.5 GB each, made once). Each run is a process of its own, and rounds alternate the
peers. The result is written after every run: scripts/results/peers/WORKLOAD.json, with its table (.md) beside
it. A peer that fails is named there, and the others still run. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

# As a script this has only its own folder on the path.
sys.path.append(str(Path(__file__).resolve().parent.parent))

import peer_report
from model_store import StoreError
from peer_error import PeerError
from peer_process import run_or_shrink
from peer_setup import CACHE, ensure_model, ensure_python, environment
from peer_workload import ONE_BATCH_AT_A_TIME, PEERS, WORKLOADS, Task, Variant, Workload, variants
from setup_steps import ROOT, SetupError

RESULTS = ROOT / "scripts" / "results" / "peers"


def run(workload: Workload, options: argparse.Namespace) -> dict[str, str]:
    """Run one workload on the chosen peers; returns per variant that failed the reason."""
    model = ensure_model()
    wanted = [variant for peer in options.peers for variant in variants(workload, peer)]
    pythons: dict[str, Path] = {}
    failed: dict[str, str] = {}
    for peer in options.peers:
        try:
            pythons[peer] = ensure_python(peer, options.vllm_python)
        except PeerError as error:
            print(f"\nerror: {error}", file=sys.stderr, flush=True)
            failed.update({variant.label: _line(error) for variant in wanted if variant.peer == peer})
    rounds: list[peer_report.Round] = []
    for number in range(options.rounds):
        rounds.append({})
        for variant in wanted:
            if variant.label not in failed:
                print(f"{workload.name}: round {number + 1} of {options.rounds}, {variant.label}", flush=True)
                task = Task(
                    workload=workload,
                    variant=variant,
                    model=str(model),
                    cache=str(CACHE),
                    requests=requests_of(workload, variant, options.requests),
                    threads=options.threads,
                )
                log_path = ROOT / "logs" / f"peers-{workload.name}-{_file_name(variant)}.log"
                try:
                    rounds[-1][variant.label] = run_or_shrink(
                        task, pythons[variant.peer], log_path, environment(options.threads), options.timeout
                    )
                except PeerError as error:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    failed[variant.label] = _line(error)
            found = peer_report.result(workload, wanted, options.rounds, rounds, failed)
            peer_report.write(options.results, workload, wanted, found)
    print(f"\n{peer_report.table(workload, wanted, found)}", flush=True)
    return failed


def requests_of(workload: Workload, variant: Variant, limit: int | None) -> int:
    """How many requests a variant runs: whole batches of at least ``limit`` where it is slow, else all."""
    if limit is None or variant.peer not in ONE_BATCH_AT_A_TIME:
        return workload.requests
    batches = -(-limit // variant.batch)
    return min(batches * variant.batch, workload.requests)


def _line(error: PeerError) -> str:
    """What the result says of an error: not the log's end, and no folders of this machine."""
    return str(error).partition("\n")[0].replace(str(ROOT), ".")


def _file_name(variant: Variant) -> str:
    return "".join(c if c.isalnum() else "-" for c in variant.label).replace("--", "-")


def _exit_on_sigterm(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)  # through the normal way out, which stops the peer


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    if not set(names) <= set(PEERS):
        raise argparse.ArgumentTypeError(f"{text!r} has others than {', '.join(PEERS)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    # What this process may use, which on a shared machine is less than what there is.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workload", choices=sorted(WORKLOADS), default="w1", help="default: w1")
    add("--peers", type=_peers, default=list(PEERS), help=f"of: {','.join(PEERS)} (default: all)")
    add("--rounds", type=_positive, default=3, help="default: 3; with --quick always 1")
    add("--quick", action="store_true", help="2 requests of 128 + 16 tokens, result in .cache/peers/results")
    add(
        "--requests", type=_positive, help="at least so many for the peers with static batches (default: all)"
    )
    add("--threads", type=_positive, default=cpus, help="of every peer (default: all CPUs)")
    add("--timeout", type=_positive, default=7200, help="seconds for one run (default: %(default)s)")
    add("--results", type=Path, help="folder for what is found")
    add("--vllm-python", type=Path, help="Python with vLLM and the plugin (default: that of .venv)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
    if options.results is None:
        options.results = CACHE / "results" if options.quick else RESULTS
    return options


def main() -> int:
    """Run the command line and return its exit status: 1 also when a peer failed."""
    options = options_of()
    workload = WORKLOADS[options.workload]
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        failed = run(workload.quick() if options.quick else workload, options)
    except (SetupError, StoreError) as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; what was measured is kept.", file=sys.stderr)
        return 130
    for label in failed:
        print(f"failed: {label}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
