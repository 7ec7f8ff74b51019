"""What the control groups of this process allow: CPU time and memory, in version 2 or 1.

A limit may sit at any level above the process, so every ancestor is read and the lowest counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

# Version 1 says "no limit" with a number close to the largest there is.
_NO_LIMIT_BYTES = 2**60


def read_cpu_quota(groups: str, root: Path) -> float | None:
    """Return how many CPUs' worth of time is allowed, or None.

    `groups` is the text of /proc/self/cgroup, `root` where the hierarchies are mounted.
    """
    folders = _list_folders(groups, "cpu", root)
    return min(_drop_none(_read_quota(folder) for folder in folders), default=None)


def read_memory_limit(groups: str, root: Path) -> int | None:
    """Return how many bytes of memory are allowed, or None."""
    folders = _list_folders(groups, "memory", root)
    limits = _drop_none(_read_limit(folder) for folder in folders)
    return min((int(limit) for limit in limits), default=None)


def _list_folders(groups: str, controller: str, root: Path) -> list[Path]:
    """Return the folders of every group above this process that may limit a resource."""
    folders = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        own = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be that of the host; the mount's top is then what counts.
        top = root / controller if controllers else root
        folders += [top / level for level in {own, *own.parents, PurePosixPath()}]
    return folders


def _read_quota(folder: Path) -> float | None:
    whole = _read_words(folder / "cpu.max")
    if len(whole) == 2:
        quota, period = whole
    else:
        quota = "".join(_read_words(folder / "cpu.cfs_quota_us"))
        period = "".join(_read_words(folder / "cpu.cfs_period_us"))
    if not quota.isdecimal() or not period.isdecimal():
        return None  # "max", -1, or no such file
    return int(quota) / int(period)


def _read_limit(folder: Path) -> float | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        words = _read_words(folder / name)
        if words and words[0].isdecimal() and int(words[0]) < _NO_LIMIT_BYTES:
            return int(words[0])
    return None


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _drop_none(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
