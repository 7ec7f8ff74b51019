"""--batch-invariant: granted, refused, and what an engine says of itself without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from forerun import kernels
from forerun.config import EngineConfig
from forerun.engine.build import _settle_crossover
from forerun.errors import ConfigError
from forerun.kernels import explain_kernels, find_kernels
from forerun.models.decoder import DecoderModel
from tiny_models import make_model

needs_kernels = pytest.mark.skipif(find_kernels() is None, reason=explain_kernels())


def settle(backend: str, *, asked: bool, crossover: int | None = None) -> tuple[bool, DecoderModel]:
    model = make_model()
    model.measure_crossover = lambda: crossover  # type: ignore[method-assign]
    resolved = SimpleNamespace(attention_backend=backend)
    config = EngineConfig.from_options(batch_invariant=asked)
    return _settle_crossover(config, resolved, model), model  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize("crossover", [None, 64])
def test_asked_for_it_never_switches(crossover: int | None) -> None:
    is_invariant, model = settle("native", asked=True, crossover=crossover)
    assert is_invariant
    assert model.plain_from is None


@needs_kernels
@pytest.mark.parametrize(
    ("backend", "crossover", "expected"),
    [("native", None, True), ("native", 64, False), ("torch_ref", None, False)],
)
def test_without_asking_it_is_what_the_kernels_give(
    backend: str, crossover: int | None, expected: bool
) -> None:
    is_invariant, model = settle(backend, asked=False, crossover=crossover)
    assert is_invariant == expected
    assert model.plain_from == crossover


@pytest.mark.parametrize("has_kernels", [True, False])
def test_it_is_refused_where_pytorch_computes(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    with pytest.raises(ConfigError, match="--batch-invariant needs the native kernels"):
        settle("torch_ref" if has_kernels else "native", asked=True)
