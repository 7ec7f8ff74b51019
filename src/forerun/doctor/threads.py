"""Threads: how many there are, who runs them, and which variables steer that.

One OpenMP runtime per process is right. A second one brings threads of its own, which fight with
the first one's for the cores; kernels that spin while they wait then become many times slower.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.doctor.report import Fact, Problem, Section

_OPENMP_LIBRARY = re.compile(r"lib(gomp|iomp5|omp)[-.].*so")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreadState:
    """What PyTorch and the process say; `own_folder` is where PyTorch keeps its libraries."""

    num_threads: int
    num_interop_threads: int
    num_usable_cores: int
    runtimes: list[Path]
    own_folder: Path
    variables: Mapping[str, str]


def find_openmp_runtimes(maps: str) -> list[Path]:
    """Return every OpenMP runtime in the text of /proc/self/maps: GNU, Intel and LLVM."""
    # Columns: range, permissions, offset, device, inode, path.
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    paths = {Path(columns[5]) for columns in fields if len(columns) == 6}
    return sorted(path for path in paths if _OPENMP_LIBRARY.match(path.name))


def check_threads(state: ThreadState) -> Section:
    """Describe threads and OpenMP; too many of either is a problem."""
    runtimes = [_describe_runtime(path, state.own_folder) for path in state.runtimes]
    variables = [f"{name}={value}" for name, value in sorted(state.variables.items())]
    return Section(
        name="threads",
        facts=[
            Fact("num_threads", state.num_threads, _describe_count(state)),
            Fact("num_interop_threads", state.num_interop_threads, str(state.num_interop_threads)),
            Fact(
                "openmp_runtimes",
                [str(path) for path in state.runtimes],
                ", ".join(runtimes) or "none found",
            ),
            Fact("variables", dict(state.variables), " ".join(variables) or "none set"),
        ],
        problems=[*_check_runtimes(state), *_check_count(state)],
    )


def _describe_runtime(path: Path, own_folder: Path) -> str:
    return f"PyTorch's own {path.name}" if path.parent == own_folder else str(path)


def _describe_count(state: ThreadState) -> str:
    steering = [name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in state.variables]
    why = f"{', '.join(steering)} set" if steering else "PyTorch's default"
    return f"{state.num_threads} on {state.num_usable_cores} usable cores: {why}"


def _check_runtimes(state: ThreadState) -> list[Problem]:
    if len(state.runtimes) < 2:
        return []
    foreign = [path for path in state.runtimes if path.parent != state.own_folder]
    names = ", ".join(str(path) for path in foreign)
    return [
        Problem(
            what=f"{len(state.runtimes)} OpenMP runtimes are loaded, which fight for the cores",
            advice=f"keep PyTorch's own and find out who loads {names}: a line in LD_PRELOAD, or a "
            "Python package; unset the one, do without the other in this environment.",
        )
    ]


def _check_count(state: ThreadState) -> list[Problem]:
    usable = state.num_usable_cores
    if state.num_threads <= usable:
        return []
    return [
        Problem(
            what=f"{state.num_threads} threads for {usable} usable cores: they wait for each other",
            advice=f"give --num-threads {usable} or set OMP_NUM_THREADS={usable}.",
        )
    ]
