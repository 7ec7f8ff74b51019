"""Choices that cannot be had are refused while resolving, before any weights are read."""

from __future__ import annotations

import pytest

from forerun.config import EngineConfig
from forerun.engine.resolve import resolve
from forerun.errors import ConfigError
from tiny_models import make_spec


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_holds_no_numbers_is_refused(device: str) -> None:
    """--device meta came up, said it was ready, and failed every request."""
    config = EngineConfig.from_options(device=device)
    spec = make_spec()
    with pytest.raises(ConfigError, match="--device"):
        resolve(config, spec, spec.build_kv_layers())
