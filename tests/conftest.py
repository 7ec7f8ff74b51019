"""Shared fixtures: fixed seeds and few threads, so that results do not depend on the order."""

from __future__ import annotations

import os
import random
import signal

# Before torch is imported. Workers share the cores: with more threads than cores, every barrier of
# a parallel region would wait for threads that do not run. Tests of threading ask for theirs.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest

# A suite started in the background ignores interrupts; those it sends itself must arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed every generator a test might use without asking."""
    random.seed(0)
    np.random.seed(0)
