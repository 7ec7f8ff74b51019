"""Refuse tensors whose blocks have scales or minima that are NaN or infinite. No torch.

One such number makes every answer of a model NaN or empty. All block formats we read keep their
scales and minima as fp16, whose exponent bits are all set in exactly these cases.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forerun.errors import ConfigError

_EXPONENT = 0x7C00
_MANTISSA = 0x03FF
# Where the fp16 numbers of a block lie, by ggml's name of the type.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def check_scales(
    blocks: np.ndarray, *, stored: str, block_bytes: int, path: Path, name: str, offset: int
) -> None:
    """Raise ConfigError if a number that scales a block is not finite.

    `blocks` are whole blocks of type `stored`, which lie in the file from byte `offset` on.
    """
    by_block = blocks.reshape(-1, block_bytes)
    firsts = [_find_first(by_block[:, at : at + 2]) for at in _HALVES.get(stored, ())]
    found = [first for first in firsts if first is not None]
    if not found:
        return
    index, kind = min(found)
    raise ConfigError(
        f"{path}: tensor {name} ({stored}) has a scale or minimum that is {kind} in the block at "
        f"byte {offset + index * block_bytes}; the file is damaged or was converted badly. "
        "Download or convert it again."
    )


def _find_first(stored: np.ndarray) -> tuple[int, str] | None:
    """Return the first block whose fp16 number [B, 2 bytes] is not finite, and what it is."""
    high = stored[:, 1]
    bad = (high & (_EXPONENT >> 8)) == _EXPONENT >> 8
    if not bad.any():
        return None
    index = int(bad.argmax())
    bits = int(stored[index, 0]) | int(high[index]) << 8
    return index, "NaN" if bits & _MANTISSA else "infinite"
