"""Shared fixtures: fixed seeds and few threads, so that results do not depend on the order."""

from __future__ import annotations

import random

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed every generator a test might use without asking."""
    random.seed(0)
    np.random.seed(0)
