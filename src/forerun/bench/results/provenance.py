"""Where a number comes from: command, commit, versions, hardware. Kept beside every result."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forerun


def collect_provenance() -> dict[str, Any]:
    """Return what is needed to run this again, and to judge whether that was the same thing."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *_hide_keys(sys.argv[1:])]),
        "git_sha": read_git_sha(Path(forerun.__file__).parent),
        "forerun": forerun.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _read_cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
    }


def read_git_sha(folder: Path) -> str | None:
    """Return the commit of a checkout, with + if files differ from it; None outside of one."""
    sha = _run_git(folder, "rev-parse", "HEAD")
    if not sha:
        return None
    return sha + ("+" if _run_git(folder, "status", "--porcelain") else "")


def _run_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _hide_keys(arguments: list[str]) -> list[str]:
    """Return the arguments without the value of --api-key."""
    hidden = [
        "***" if before == "--api-key" else argument
        for before, argument in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--api-key=***" if arg.startswith("--api-key=") else arg for arg in hidden]


def _read_cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
