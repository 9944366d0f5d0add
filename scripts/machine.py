"""What a result says about the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """Architecture, CPU model and number of CPUs, in one line."""
    return f"{platform.machine()}, {_cpu_model()}, {os.cpu_count()} CPUs"


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
