"""Decoding: bit for bit what the gguf package reads from the same bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from forerun.quantisation.decode import decode
from forerun.quantisation.formats import FORMATS, BlockTensor
from quantised_blocks import EXTREMES, HALVES, make_blocks, put_halves

HALF = np.finfo(np.float16)


def read_with_gguf(tensor: BlockTensor) -> np.ndarray:
    return gguf.dequantize(tensor.blocks, gguf.GGMLQuantizationType(tensor.format.type_id))


@pytest.mark.parametrize("fill", [None, *EXTREMES])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_gguf_package(name: str, fill: int | None) -> None:
    tensor = make_blocks(name, 7, 768, fill=fill)
    codes = decode(tensor)
    assert codes.codes.shape == (7, 768)
    assert codes.scales.shape == codes.minima.shape == (7, 24)
    np.testing.assert_array_equal(codes.to_float(), read_with_gguf(tensor))


@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_gguf_package_at_the_ends_of_fp16(name: str) -> None:
    ends = np.array([0, -0.0, HALF.smallest_subnormal, -HALF.tiny, HALF.max, HALF.min, 1, -1])
    tensor = make_blocks(name, 8, 256)
    blocks = tensor.blocks.reshape(-1, tensor.format.block_bytes)
    values = np.resize(ends, (len(HALVES[name]), len(blocks)))
    put_halves(blocks, name, values)
    np.testing.assert_array_equal(decode(tensor).to_float(), read_with_gguf(tensor))


def test_values_of_hand_made_blocks() -> None:
    half = np.array([0.5, 3], "<f2").view(np.uint8)
    nibbles = np.full(16, 0xF0, np.uint8)  # 16 zeros, then 16 times 15
    q4_1 = BlockTensor(np.concatenate([half, nibbles])[None], FORMATS["Q4_1"])
    assert decode(q4_1).to_float().tolist() == [[3.0] * 16 + [10.5] * 16]
    fifth = np.array([0x01, 0, 0, 0x80], np.uint8)  # of the first and the last number
    q5_0 = BlockTensor(np.concatenate([half[:2], fifth, nibbles])[None], FORMATS["Q5_0"])
    assert decode(q5_0).to_float().tolist() == [[0.0, *[-8.0] * 15, *[-0.5] * 15, 7.5]]


@pytest.mark.parametrize("name", FORMATS)
def test_codes_stay_below_what_float32_sums_exactly(name: str) -> None:
    """32 codes times an int8 must stay under 2^24."""
    for fill in EXTREMES:
        codes = decode(make_blocks(name, 3, 256, fill=fill)).codes.astype(np.int64)
        assert np.abs(codes).max() * 127 * 32 < 2**24


def test_formats_are_those_of_ggml() -> None:
    for name, kind in FORMATS.items():
        ggml = gguf.GGMLQuantizationType[name]
        assert kind.name == name
        assert kind.type_id == ggml.value
        assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[ggml]
    assert sorted(kind.code for kind in FORMATS.values()) == list(range(1, 9))
