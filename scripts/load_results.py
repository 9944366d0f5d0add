"""The result file of a load test: one JSON per workload, written after every server.

A round holds the date, machine and versions that it was measured with, so that rounds can be added later.
"""

from __future__ import annotations

import json
import subprocess
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import load_report
import machine
from load_workload import Workload
from setup_steps import ROOT

_CONDITIONS = ("date", "machine", "versions")


class ResultError(ValueError):
    """A result can't be added to; the message says why."""


class Results:
    """What was measured of one workload so far.

    Attributes:
        rounds: per round ``date``, ``machine``, ``versions`` and ``servers``, which holds the figures of
            ``load_run.run_variant`` per variant.
    """

    def __init__(self, workload: Workload, folder: Path, rounds_wanted: int) -> None:
        self._workload = workload
        self._json = folder / f"{workload.name}.json"
        self._rounds_wanted = rounds_wanted
        self.rounds: list[dict[str, Any]] = []

    def load(self) -> None:
        """Go on from what the file holds, if there is one.

        Raises:
            ResultError: it isn't a result, or one of another workload than this has become, or of another
                machine.
        """
        if not self._json.exists():
            return
        try:
            content = json.loads(self._json.read_text(encoding="utf-8"))
            measured, self.rounds = content["workload"], content["rounds"]
        except (ValueError, KeyError, TypeError) as error:
            raise ResultError(f"{self._json} is no result of a load test: {error!r}") from error
        if measured != self._definition():
            raise ResultError(
                f"{self._json} was measured with other servers or loads than "
                f"{self._workload.name}.yaml has now. Leave --add out to measure anew."
            )
        if others := {r["machine"] for r in self.rounds} - {machine.describe()}:
            raise ResultError(
                f"{self._json} was measured on another machine ({', '.join(others)}) than this one "
                f"({machine.describe()}). Give another folder with --results, or leave --add out."
            )

    def want_rounds(self, number: int) -> None:
        """Change how many complete rounds are wanted in all."""
        self._rounds_wanted = number

    def missing_rounds(self) -> int:
        """How many rounds are still to be run; one that was cut stays, and counts for none."""
        return max(0, self._rounds_wanted - self._complete_rounds())

    def start_round(self) -> None:
        """Begin a round under the conditions of now."""
        versions = {name: version(name) for name in ("vllm", "torch", "vllm-h2o")}
        if commit := _commit():
            versions["commit"] = commit
        conditions = (date.today().isoformat(), machine.describe(), versions)
        self.rounds.append({**dict(zip(_CONDITIONS, conditions, strict=True)), "servers": {}})

    def add(self, variant: str, figures: dict[str, dict[str, Any]]) -> None:
        """Add one server to the round, and write the file and its table."""
        self.rounds[-1]["servers"][variant] = figures
        found = self.found()
        content = {
            "description": self._workload.description,
            "complete": self.missing_rounds() == 0,
            "rounds_wanted": self._rounds_wanted,
            "workload": self._definition(),
            **found,
            "rounds": self.rounds,
        }
        self._json.parent.mkdir(parents=True, exist_ok=True)
        self._json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self._json.with_suffix(".md").write_text(self.table(), encoding="utf-8")

    def found(self) -> dict[str, Any]:
        """Medians and ratios over all rounds so far."""
        return load_report.summary(self._workload, [r["servers"] for r in self.rounds])

    def table(self) -> str:
        """Medians, ratios, and on what they were measured, as Markdown."""
        complete, wanted = self._complete_rounds(), self._rounds_wanted
        state = f"{complete} rounds" if complete >= wanted else f"partial: {complete} of {wanted} rounds"
        conditions = {tuple(str(r[name]) for name in _CONDITIONS[:2]): r["versions"] for r in self.rounds}
        where = "; ".join(
            f"{', '.join(names)} ({', '.join(f'{k} {v}' for k, v in versions.items())})"
            for names, versions in conditions.items()
        )
        return f"{load_report.table(self._workload, self.found())}\n{state}; {where}\n"

    def plot(self) -> None:
        """Draw the picture beside the file."""
        load_report.plot(self._workload, self.found(), self._json.with_suffix(".png"))

    def _complete_rounds(self) -> int:
        return sum(set(self._workload.variants) <= set(r["servers"]) for r in self.rounds)

    def _definition(self) -> dict[str, Any]:
        return {"servers": self._workload.variants, "loads": self._workload.loads}


def _commit() -> str | None:
    """The commit of this checkout, if it is one, and whether files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
