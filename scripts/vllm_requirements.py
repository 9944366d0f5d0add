"""Prints what an installed distribution needs on this machine, one requirement a line.

Run with the Python of the environment in question; the distribution's name and the names to leave
out are the arguments. It imports nothing but `packaging`, which has to be there.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed(requirements: Iterable[str], leave_out: Iterable[str] = ()) -> list[str]:
    """Return the requirements that hold on this machine without any extra, minus `leave_out`."""
    left_out = {canonicalize_name(name) for name in leave_out}
    wanted: list[str] = []
    for text in requirements:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) in left_out:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        # The marker has been decided; pip would only decide it again.
        requirement.marker = None
        wanted.append(str(requirement))
    return wanted


if __name__ == "__main__":
    distribution, *names = sys.argv[1:]
    print("\n".join(needed(importlib.metadata.requires(distribution) or [], names)))
