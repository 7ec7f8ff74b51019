"""Scales that are not finite are refused, by tensor, type and place."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from forerun.errors import ConfigError
from forerun.quantisation.check import check_scales
from quantised_blocks import HALVES, fill_blocks, put_halves

FIELDS = [(kind, field) for kind, places in HALVES.items() for field in range(len(places))]


def check(blocks: np.ndarray, kind: str) -> None:
    check_scales(
        blocks, stored=kind, block_bytes=blocks.shape[1], path=Path("m.gguf"), name="w", offset=1000
    )


def make(kind: str, num_blocks: int = 40) -> np.ndarray:
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return fill_blocks(num_blocks, block_bytes, kind, np.random.default_rng(0), fill=None)


@pytest.mark.parametrize("kind", HALVES)
def test_finite_scales_pass_whatever_the_other_bytes_are(kind: str) -> None:
    blocks = make(kind)
    check(blocks, kind)
    blocks[:] = 0xFF
    largest = np.finfo(np.float16).max
    put_halves(blocks, kind, np.full((len(HALVES[kind]), len(blocks)), -largest))
    check(blocks, kind)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
@pytest.mark.parametrize(
    ("bits", "word"),
    [(0x7C00, "infinite"), (0xFC00, "infinite"), (0x7C01, "NaN"), (0xFE00, "NaN")],
)
def test_the_first_bad_block_is_named(kind: str, field: int, bits: int, word: str) -> None:
    blocks = make(kind)
    place = HALVES[kind][field]
    for index in (31, 17):
        blocks[index, place : place + 2] = np.array([bits], "<u2").view(np.uint8)
    byte = 1000 + 17 * blocks.shape[1]
    with pytest.raises(ConfigError, match=rf"m\.gguf: tensor w \({kind}\).*{word}.*byte {byte};"):
        check(blocks, kind)


def test_the_earlier_of_a_bad_scale_and_a_bad_minimum_is_named() -> None:
    blocks = make("Q4_1")
    blocks[9, 1], blocks[5, 3] = 0x7C, 0x7C
    with pytest.raises(ConfigError, match=f"byte {1000 + 5 * 20};"):
        check(blocks, "Q4_1")


def test_plain_types_have_no_scales() -> None:
    check(np.full((3, 2), 0xFF, np.uint8), "F16")
