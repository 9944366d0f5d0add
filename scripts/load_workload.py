"""What a load test runs: one YAML file of configs/load, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Flags = dict[str, Any]
"""Options of a command without their dashes; False and None leave one out, True gives it without a value."""

_BENCH_DEFAULTS: Flags = {"dataset-name": "random", "ignore-eos": True, "temperature": 0, "seed": 0}
_SERVER_DEFAULTS: Flags = {
    "dtype": "bfloat16",
    "block-size": 32,
    "enforce-eager": True,
    "no-enable-prefix-caching": True,
    # Without it vLLM wants nearly all memory of the machine, whatever the number of blocks.
    "kv-cache-memory-bytes": 2 * 1024**3,
    "seed": 0,
}


class WorkloadError(ValueError):
    """A workload file says something that can't be run; the message names it."""


@dataclass(frozen=True)
class Comparison:
    """Output throughput of one variant over that of another, in runs next to each other."""

    name: str
    of: str
    to: str


@dataclass(frozen=True)
class Workload:
    """Variants of a server, and loads that each of them gets.

    Attributes:
        variants: per name the server's flags.
        loads: per name the flags of ``vllm bench serve``.
        floors: per load and comparison the lowest ratio that passes.
    """

    name: str
    description: str
    variants: dict[str, Flags]
    loads: dict[str, Flags]
    comparisons: tuple[Comparison, ...]
    floors: dict[str, dict[str, float]]


def read(path: Path) -> Workload:
    """Read one file.

    Raises:
        WorkloadError: it isn't there, isn't YAML, or refers to what it doesn't define.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise WorkloadError(f"{path} can't be read: {error}") from error
    known = {"description", "server", "variants", "loads", "compare", "floors"}
    needed = {"description", "variants", "loads"}
    if not isinstance(content, dict) or not needed <= set(content) <= known:
        raise WorkloadError(
            f"{path} must have the keys {sorted(needed)}, and may have {sorted(known - needed)}"
        )
    workload = Workload(
        name=path.stem,
        description=content["description"],
        variants={
            name: {**_SERVER_DEFAULTS, **content.get("server", {}), **(flags or {})}
            for name, flags in content["variants"].items()
        },
        loads={name: {**_BENCH_DEFAULTS, **flags} for name, flags in content["loads"].items()},
        comparisons=tuple(Comparison(**comparison) for comparison in content.get("compare", ())),
        floors=content.get("floors", {}),
    )
    for comparison in workload.comparisons:
        for variant in (comparison.of, comparison.to):
            if variant not in workload.variants:
                raise WorkloadError(
                    f"{path} compares {variant!r}, which is none of {list(workload.variants)}"
                )
    names = {comparison.name for comparison in workload.comparisons}
    for load, floors in workload.floors.items():
        if load not in workload.loads or not set(floors) <= names:
            raise WorkloadError(f"{path} sets floors for {load!r}: {floors}, which it doesn't compare")
    return workload


def arguments(flags: Flags) -> list[str]:
    """The flags as a command line."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not False and value is not None:
            words += [f"--{name}", str(value)]
    return words
