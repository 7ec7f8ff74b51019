"""--kv-cache-dtype: what an engine gets, what it says of it, and what is refused."""

from __future__ import annotations

import pytest
import torch

from forerun.config import EngineConfig
from forerun.engine import resolve as resolving
from forerun.engine.resolve import Resolved, resolve
from forerun.errors import ConfigError
from tiny_models import make_spec


def choose(dtype: str = "bfloat16", **options: object) -> Resolved:
    spec = make_spec()
    config = EngineConfig.from_options(kv_cache_memory="1M", dtype=dtype, device="cpu", **options)
    return resolve(config, spec, spec.build_kv_layers())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_auto_is_the_type_of_the_model(dtype: str) -> None:
    assert choose(dtype).kv_dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_int8_is_taken_for_either_type(dtype: str) -> None:
    resolved = choose(dtype, kv_cache_dtype="int8")
    assert resolved.kv_dtype == torch.int8
    assert resolved.dtype == getattr(torch, dtype)


def test_the_same_memory_holds_more_blocks_in_int8() -> None:
    """12 numbers to a head: 24 bytes in bfloat16, 12 and a scale of 4 in int8."""
    plain, quantised = choose(), choose(kv_cache_dtype="int8")
    assert plain.num_blocks == 2**20 // (16 * 2 * 2 * 2 * 24)
    assert quantised.num_blocks == 2**20 // (16 * 2 * 2 * 2 * 16)


def test_the_choice_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="forerun"):
        choose()
        choose(kv_cache_dtype="int8")
    lines = [line for line in caplog.messages if line.startswith("KV pool in ")]
    assert lines == [
        "KV pool in bfloat16: the model's type",
        "KV pool in int8: given; a scale per token and KV head",
    ]


def test_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, int8, got 'fp8'"):
        EngineConfig.from_options(kv_cache_dtype="fp8")


def test_a_device_that_cannot_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NotImplementedError("'round' is not implemented for this device\nlong story")

    monkeypatch.setattr(resolving, "quantise_rows", fail)
    with pytest.raises(ConfigError, match="int8 cannot be had on cpu: 'round' is not.*Give auto"):
        choose(kv_cache_dtype="int8")
    assert choose().kv_dtype == torch.bfloat16
