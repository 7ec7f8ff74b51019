"""Logging set-up: one format, to stderr, with the process role as prefix."""

from __future__ import annotations

import logging
import sys

from forerun import env

_ROOT = "forerun"


def configure_logging(role: str) -> None:
    """Send this process's log lines to stderr, prefixed with its role (api, engine, ...)."""
    handler = logging.StreamHandler(sys.stderr)
    pattern = f"%(asctime)s {role} %(levelname)s %(message)s"
    handler.setFormatter(logging.Formatter(pattern, datefmt="%H:%M:%S"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(env.log_level())
    root.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; pass __name__."""
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")
