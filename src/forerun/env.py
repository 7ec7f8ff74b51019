"""The only place that touches environment variables. Bad values raise ConfigError."""

from __future__ import annotations

import os
from pathlib import Path

from forerun.errors import ConfigError

# What OpenMP and the libraries under PyTorch obey; Forerun only reports it.
_NATIVE = ("OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_", "THP_", "LD_PRELOAD")

_SPIN_COUNT = "1000"


def cache_dir() -> Path:
    """Return the folder for downloaded models and derived files (FORERUN_CACHE)."""
    given = os.environ.get("FORERUN_CACHE")
    if given is None:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(base) / "forerun"
    if not given.strip():
        raise ConfigError("FORERUN_CACHE is set but empty; give a folder or unset it.")
    return Path(given)


def log_level() -> str:
    """Return the log level name (FORERUN_LOG_LEVEL, default INFO)."""
    level = os.environ.get("FORERUN_LOG_LEVEL", "INFO").upper()
    allowed = ("DEBUG", "INFO", "WARNING", "ERROR")
    if level not in allowed:
        raise ConfigError(f"FORERUN_LOG_LEVEL is {level!r}; allowed are {', '.join(allowed)}.")
    return level


def native_variables() -> dict[str, str]:
    """Return the variables that steer threads and instruction sets of native code."""
    return {name: value for name, value in os.environ.items() if name.startswith(_NATIVE)}


def limit_openmp_spinning() -> None:
    """Let threads that wait for others sleep after some microseconds, unless the user decided.

    libgomp's default is to spin for milliseconds. Alone that gains nothing here; next to another
    busy process it keeps the core from the very thread that is waited for, and a step takes 2 to 4
    times as long (docs/log.md).
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = _SPIN_COUNT


def cxx_compiler() -> str | None:
    """Return the C++ compiler that a build is told to use (CXX)."""
    return os.environ.get("CXX")
