"""Runs tests twice: sampling with the native kernels of this machine, and in PyTorch alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forerun.kernels import explain_kernels, find_kernels, row_calls


@pytest.fixture(params=["native", "pytorch"], scope="module", autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Make sampling take one of the paths; returns its name."""
    if request.param == "native" and find_kernels() is None:
        pytest.skip(f"no native kernels: {explain_kernels()}")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "pytorch":
            patch.setattr(row_calls, "find_kernels", lambda: None)
        yield request.param
