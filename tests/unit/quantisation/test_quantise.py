"""Q8_0 from floats: byte for byte what the gguf package writes, and no weight that cannot be."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from forerun.errors import ConfigError
from forerun.quantisation import quantise as module
from forerun.quantisation.quantise import quantise


def quantise_with_gguf(weight: torch.Tensor) -> np.ndarray:
    return gguf.quantize(weight.float().numpy(), gguf.GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_gguf_package(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_VALUES", 5 * 96)
    sizes = torch.logspace(-6, 4, 64)[:, None]
    weight = (torch.randn(64, 96) * sizes).to(dtype)
    weight[7] = 0
    np.testing.assert_array_equal(quantise(weight, "w"), quantise_with_gguf(weight))


def test_halves_are_rounded_away_from_zero() -> None:
    weight = torch.arange(-127, 128)[:, None] / 2 + torch.zeros(1, 32)
    weight[:, 0] = 127
    weight[:, 1] = 0.49999997  # plus a half it would round up to one
    blocks = quantise(weight, "w")
    np.testing.assert_array_equal(blocks, quantise_with_gguf(weight))
    codes = blocks[:, 2:].view(np.int8)
    assert codes[[126, 128], 5].tolist() == [-1, 1]
    assert not codes[:, 1].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = torch.randn(4, 64)
    weight[2, 40] = value
    with pytest.raises(ConfigError, match=r"tensor blk\.0\.w has weights that are NaN or infinite"):
        quantise(weight, "blk.0.w")


def test_weights_beyond_fp16_scales_are_refused() -> None:
    weight = torch.randn(4, 64)
    weight[0, 0] = 65504.0 * 127
    quantise(weight, "w")
    weight[0, 0] *= 1.1
    with pytest.raises(ConfigError, match=r"9\.15e\+06; Q8_0 holds at most 8\.32e\+06"):
        quantise(weight, "w")
