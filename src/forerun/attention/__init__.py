"""How K/V are written and read. Registry of lazy backend factories."""

from __future__ import annotations

from collections.abc import Callable

from forerun.attention.base import AttentionBackend
from forerun.errors import ConfigError


def _torch_ref() -> AttentionBackend:
    from forerun.attention.torch_ref import TorchRefBackend

    return TorchRefBackend()


def _native() -> AttentionBackend:
    from forerun.attention.native import NativeBackend
    from forerun.kernels import explain_kernels, find_kernels

    kernels = find_kernels()
    if kernels is None:
        raise ConfigError(
            f"--attention-backend native needs native kernels: {explain_kernels()}. "
            "Give auto or torch_ref."
        )
    return NativeBackend(kernels)


BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "native": _native,
    "torch_ref": _torch_ref,
}


def build_attention_backend(name: str) -> AttentionBackend:
    """Return the named backend; raises ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(
            f"unknown attention backend {name!r}; allowed: {', '.join(sorted(BACKENDS))}."
        )
    return BACKENDS[name]()
