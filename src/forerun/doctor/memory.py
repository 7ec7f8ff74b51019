"""Memory and limits: how much there is, how fast it is read, huge pages, open files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.doctor.report import Fact, Problem, Section, format_bytes

# Sockets aside, a server keeps a few dozen files open.
_SPARE_FILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryState:
    """What the system says; None where it says nothing."""

    mem_info: str
    limit_bytes: int | None
    huge_pages: str | None
    max_open_files: int
    bandwidth: float | None
    kv_pool_bytes: int
    num_running: int
    num_clients: int


def check_memory(state: MemoryState) -> Section:
    """Describe memory; what does not hold Forerun's defaults is a problem."""
    total = read_amount(state.mem_info, "MemTotal")
    available = read_amount(state.mem_info, "MemAvailable")
    limit = state.limit_bytes
    pages = _find_chosen(state.huge_pages)
    files = state.max_open_files
    return Section(
        name="memory",
        facts=[
            Fact("total_bytes", total, _describe_amount(total)),
            Fact("available_bytes", available, _describe_amount(available)),
            Fact("cgroup_limit_bytes", limit, "none" if limit is None else format_bytes(limit)),
            Fact("read_bandwidth_bytes_per_s", state.bandwidth, _describe_speed(state.bandwidth)),
            Fact("transparent_huge_pages", pages, pages or "not told by this system"),
            Fact("max_open_files", files, _describe_files(state)),
        ],
        problems=[
            *_check_space(state, available),
            *_check_huge_pages(pages),
            *_check_files(state),
        ],
    )


def read_amount(mem_info: str, name: str) -> int | None:
    """Return a line of the text of /proc/meminfo, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", mem_info, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


def _find_chosen(setting: str | None) -> str | None:
    """Return the bracketed word of "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", setting or "")
    return None if found is None else found[1]


def _describe_amount(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_bytes(num_bytes)


def _describe_speed(bandwidth: float | None) -> str:
    if bandwidth is None:
        return "not measured"
    floor_ms = 1e12 / bandwidth
    return f"{bandwidth / 1e9:.1f} GB/s by all threads: 1 GB of weights takes {floor_ms:.0f} ms"


def _describe_files(state: MemoryState) -> str:
    most = state.max_open_files - _SPARE_FILES
    enough = "" if most >= state.num_clients else f", of {state.num_clients} the defaults can queue"
    return f"{state.max_open_files}: about {max(0, most)} clients at once{enough}"


def _check_space(state: MemoryState, available: int | None) -> list[Problem]:
    bounds = [bound for bound in (available, state.limit_bytes) if bound is not None]
    if not bounds or min(bounds) >= state.kv_pool_bytes:
        return []
    pool = format_bytes(state.kv_pool_bytes)
    return [
        Problem(
            what=f"{format_bytes(min(bounds))} of memory are free, the KV pool takes {pool}",
            advice="free memory, or give a smaller pool such as --kv-cache-memory 256M.",
        )
    ]


def _check_huge_pages(pages: str | None) -> list[Problem]:
    if pages != "never":
        return []
    return [
        Problem(
            what="transparent huge pages are off: reading the KV pool is slower than it need be",
            advice="as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    ]


def _check_files(state: MemoryState) -> list[Problem]:
    needed = state.num_running + _SPARE_FILES
    if state.max_open_files >= needed:
        return []
    return [
        Problem(
            what=f"{state.max_open_files} open files are allowed; a server of "
            f"{state.num_running} running requests needs {needed}",
            advice="run ulimit -n 4096 before forerun serve, or give a lower --max-num-seqs.",
        )
    ]
