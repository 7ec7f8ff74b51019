"""Every kernel test runs on each instruction set this machine can run, with one and two threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forerun.kernels import Kernels
from forerun.kernels.loader import VARIANTS
from native_kernels import load_variant


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_variant(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    """Give the thread count back to the next test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
