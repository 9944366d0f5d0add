#!/usr/bin/env python3
"""Measures everything that the README's tables and plots show, one script after the other. It takes hours.

    python3 scripts/measure_all.py                 # all of it
    python3 scripts/measure_all.py load peers      # some parts

Each part writes its own results (see there). One that fails is named at the end, and the others still run.
Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from setup_env import ensure_environment
from setup_steps import ROOT, VENV_PYTHON, SetupError

SCRIPTS = ROOT / "scripts"

PARTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kernels": (("measure_kernels.py",),),
    "overhead": (("measure_overhead.py",),),
    "load": (("load_test.py", "--all"),),
    # From the load tests and the kernels, so after both.
    "cost-model": (("cost_model.py",),),
    "peers": tuple(("peers/run_peers.py", "--workload", name) for name in ("w1", "w2", "w3", "w4")),
    "quality": tuple(
        ("eval_quality.py", "--plan", f"configs/quality/{name}.yaml")
        for name in ("full", "needles", "chunked", "defaults")
    ),
}


def main() -> int:
    """Run the command line and return its exit status: 1 when a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of: {', '.join(PARTS)} (default: all)")
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part!r}; known: {', '.join(PARTS)}")
    try:
        ensure_environment({"model", "bench"})
    except SetupError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    failed = []
    for part in options.parts or PARTS:
        for script, *words in PARTS[part]:
            print(f"\n==> {script} {' '.join(words)}", flush=True)
            if subprocess.run([str(VENV_PYTHON), str(SCRIPTS / script), *words], cwd=ROOT).returncode:
                failed.append(f"{script} {' '.join(words)}")
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
