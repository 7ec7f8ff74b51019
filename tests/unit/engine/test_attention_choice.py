"""Which attention backend an engine gets, and what is said when it cannot have it."""

from __future__ import annotations

import pytest

from forerun import attention, kernels
from forerun.attention import build_attention_backend
from forerun.attention.native import NativeBackend
from forerun.attention.torch_ref import TorchRefBackend
from forerun.config import EngineConfig
from forerun.engine import resolve as resolving
from forerun.engine.resolve import resolve
from forerun.errors import ConfigError
from forerun.kernels import explain_kernels, find_kernels
from tiny_models import make_spec


def choose(**options: object) -> str:
    spec = make_spec()
    config = EngineConfig.from_options(kv_cache_memory="1M", dtype="float32", **options)
    return resolve(config, spec, spec.build_kv_layers()).attention_backend


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels, resolving):
        monkeypatch.setattr(module, "find_kernels", lambda: None)
        monkeypatch.setattr(module, "explain_kernels", lambda: "no compiler")


def test_auto_takes_the_kernels_on_a_cpu_that_has_them() -> None:
    if find_kernels() is None:
        pytest.skip(f"no native kernels: {explain_kernels()}")
    assert choose(device="cpu") == "native"
    assert isinstance(build_attention_backend("native"), NativeBackend)


@pytest.mark.usefixtures("without_kernels")
def test_auto_falls_back_to_pytorch() -> None:
    assert choose(device="cpu") == "torch_ref"


def test_a_given_backend_is_taken() -> None:
    assert choose(device="cpu", attention_backend="torch_ref") == "torch_ref"
    assert isinstance(build_attention_backend("torch_ref"), TorchRefBackend)


@pytest.mark.usefixtures("without_kernels")
def test_native_without_kernels_says_why() -> None:
    with pytest.raises(ConfigError, match=r"native needs native kernels: no compiler\. Give auto"):
        build_attention_backend("native")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, native"):
        choose(attention_backend="flash")
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; allowed: native"):
        build_attention_backend("flash")
    assert set(attention.BACKENDS) == {"native", "torch_ref"}
