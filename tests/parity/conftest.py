"""Every parity test runs twice: on the native kernels, and in PyTorch alone."""

from __future__ import annotations

import pytest

import tiny_models
from forerun import kernels
from forerun.attention import build_attention_backend
from forerun.kernels import explain_kernels, find_kernels


@pytest.fixture(params=["native", "torch_ref"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Choose attention, linear layers and the rest together; the name of the attention backend."""
    name: str = request.param
    if name == "torch_ref":
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    elif find_kernels() is None:
        pytest.skip(f"no native kernels: {explain_kernels()}")
    monkeypatch.setattr(
        tiny_models, "build_attention_backend", lambda _: build_attention_backend(name)
    )
    return name
