"""What this processor can do, and which OpenMP runtimes this process has. Linux only.

Read from the kernel, which knows what both the CPU and the operating system support.
"""

from __future__ import annotations

import platform
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
MEMORY_MAPS = Path("/proc/self/maps")


def read_cpu_flags(cpu_info: Path = CPU_INFO) -> frozenset[str]:
    """Return the flags of the first CPU; empty where the system does not tell."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def find_openmp_runtimes(maps: Path = MEMORY_MAPS) -> list[Path]:
    """Return every libgomp mapped into this process."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    # Columns: range, permissions, offset, device, inode, path.
    fields = (line.split(maxsplit=5) for line in lines)
    paths = {Path(columns[5]) for columns in fields if len(columns) == 6}
    return sorted(path for path in paths if path.name.startswith("libgomp"))


def read_cpu_name(cpu_info: Path = CPU_INFO) -> str:
    """Return what the first CPU calls itself; its architecture where the system does not tell."""
    try:
        lines = cpu_info.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()
