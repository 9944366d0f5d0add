"""What a result says about the machine that it was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

# bfloat16 is many times slower without instructions of its own, so results can't be compared across these.
_EXTENSIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bfloat16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}


def describe() -> str:
    """Architecture, CPU model, number of CPUs and the widest instructions they have, in one line."""
    cpuinfo = _cpuinfo()
    model = cpuinfo.get("model name", platform.processor())
    flags = cpuinfo.get("flags", "").split()
    parts = [platform.machine(), model, f"{os.cpu_count()} CPUs"]
    return ", ".join([*parts, *[name for flag, name in _EXTENSIONS.items() if flag in flags][:1]])


def _cpuinfo() -> dict[str, str]:
    """What Linux says about the first CPU; nothing elsewhere."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition(":") for line in reversed(lines))  # the first CPU comes last, and stays
    return {name.strip(): value.strip() for name, _, value in pairs}
