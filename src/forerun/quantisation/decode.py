"""The numbers in blocks: integer codes, and per 32 of them a scale and a minimum. No torch.

A weight is scale * code + minimum. Codes and scales are chosen so that this product is what ggml
computes, bit for bit in float32: sub-block scales of Q6_K, which cover 16 numbers, go into the
codes, those of Q4_K and Q5_K, which cover 32, into scale and minimum.
Shapes: B blocks, N rows, K numbers per row, S numbers per block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from forerun.quantisation.formats import GROUP_SIZE, BlockTensor


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A decoded weight; |codes| is at most 4,096."""

    codes: np.ndarray  # int16 [N, K]
    scales: np.ndarray  # float32 [N, K / 32]
    minima: np.ndarray  # float32 [N, K / 32]

    def to_float(self) -> np.ndarray:
        """Return the weights, float32 [N, K]."""
        num_rows, num_groups = self.scales.shape
        grouped = self.codes.reshape(num_rows, num_groups, GROUP_SIZE).astype(np.float32)
        values: np.ndarray = grouped * self.scales[..., None] + self.minima[..., None]
        return values.reshape(self.codes.shape)


# Codes [B, S], scales and minima [B, S / 32].
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def decode(tensor: BlockTensor) -> Codes:
    """Return the numbers of a tensor."""
    blocks = tensor.blocks.reshape(-1, tensor.format.block_bytes)
    codes, scales, minima = _DECODERS[tensor.format.name](blocks)
    num_rows = tensor.out_features
    return Codes(
        codes=codes.reshape(num_rows, tensor.in_features),
        scales=scales.reshape(num_rows, -1),
        minima=minima.reshape(num_rows, -1),
    )


def _read_half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """Return the fp16 numbers at one place of every block, float32 [B, 1]."""
    stored = np.ascontiguousarray(blocks[:, offset : offset + 2])
    return stored.view("<f2").astype(np.float32)


def _read_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low nibbles of all bytes, then the high ones: int16 [B, 2 * bytes]."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.int16)


def _read_fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Return the bits of four bytes as 16 or 0: int16 [B, 32]."""
    bits = np.unpackbits(np.ascontiguousarray(packed), axis=1, bitorder="little")
    return bits.astype(np.int16) << 4


def _decode_q8_0(blocks: np.ndarray) -> _Parts:
    scales = _read_half(blocks, 0)
    codes = np.ascontiguousarray(blocks[:, 2:]).view(np.int8).astype(np.int16)
    return codes, scales, np.zeros_like(scales)


def _decode_q4_0(blocks: np.ndarray) -> _Parts:
    scales = _read_half(blocks, 0)
    return _read_nibbles(blocks[:, 2:]) - np.int16(8), scales, np.zeros_like(scales)


def _decode_q4_1(blocks: np.ndarray) -> _Parts:
    return _read_nibbles(blocks[:, 4:]), _read_half(blocks, 0), _read_half(blocks, 2)


def _decode_q5_0(blocks: np.ndarray) -> _Parts:
    scales = _read_half(blocks, 0)
    codes = _read_nibbles(blocks[:, 6:]) + _read_fifth_bits(blocks[:, 2:6])
    return codes - np.int16(16), scales, np.zeros_like(scales)


def _decode_q5_1(blocks: np.ndarray) -> _Parts:
    codes = _read_nibbles(blocks[:, 8:]) + _read_fifth_bits(blocks[:, 4:8])
    return codes, _read_half(blocks, 0), _read_half(blocks, 2)


def _read_k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima of the eight groups of Q4_K or Q5_K.

    Twelve bytes hold eight scales and eight minima of six bits: bytes 0-3 and 4-7 the first four of
    each, whose top two bits belong to the last four; bytes 8-11 the low nibbles of those.
    """
    first_scales, first_minima, rest = (blocks[:, 4 + 4 * i : 8 + 4 * i] for i in range(3))
    last_scales = (rest & 0x0F) | ((first_scales >> 2) & 0x30)
    last_minima = (rest >> 4) | ((first_minima >> 2) & 0x30)
    scales = np.concatenate([first_scales & 0x3F, last_scales], axis=1).astype(np.float32)
    minima = np.concatenate([first_minima & 0x3F, last_minima], axis=1).astype(np.float32)
    return _read_half(blocks, 0) * scales, -(_read_half(blocks, 2) * minima)


def _read_k_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return nibbles [B, 256]: low and high ones of 32 bytes are 64 numbers in a row."""
    return _read_nibbles(packed.reshape(-1, 32)).reshape(len(packed), -1)


def _decode_q4_k(blocks: np.ndarray) -> _Parts:
    return _read_k_nibbles(blocks[:, 16:]), *_read_k_scales(blocks)


def _decode_q5_k(blocks: np.ndarray) -> _Parts:
    # Bit g of byte i is the fifth bit of number i of group g.
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts) & 1
    codes = _read_k_nibbles(blocks[:, 48:]) + (fifth.reshape(len(blocks), -1).astype(np.int16) << 4)
    return codes, *_read_k_scales(blocks)


def _decode_q6_k(blocks: np.ndarray) -> _Parts:
    # A half of 128 numbers: low nibbles of 64 bytes, then their high nibbles; and 32 bytes of which
    # bits 2i and 2i + 1 belong to the i-th 32 numbers.
    low = _read_nibbles(blocks[:, :128].reshape(-1, 64)).reshape(len(blocks), -1)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    plain = low + (high.reshape(len(blocks), -1).astype(np.int16) << 4) - np.int16(32)
    sub_scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.int16)
    codes = plain.reshape(-1, 16, 16) * sub_scales[..., None]
    scales = np.repeat(_read_half(blocks, 208), 8, axis=1)
    return codes.reshape(len(blocks), -1), scales, np.zeros_like(scales)


_DECODERS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q5_0": _decode_q5_0,
    "Q5_1": _decode_q5_1,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
}
