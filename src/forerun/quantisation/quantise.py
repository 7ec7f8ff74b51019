"""Float weights to Q8_0, number for number as ggml does it.

Per 32 numbers: d = max|x| / 127, codes = x * (1 / d) rounded half away from zero, and d is stored
in fp16 after that.
Shapes: N rows, K in_features, a multiple of 32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.quantisation.formats import GROUP_SIZE, Q8_0

_LARGEST_SCALE = torch.finfo(torch.float16).max
_CHUNK_VALUES = 2**17


def quantise(weight: Tensor, name: str) -> np.ndarray:
    """Return a float weight [N, K] as Q8_0 blocks, bytes [N, K / 32 * 34].

    Raises ConfigError naming the tensor if a number is NaN, infinite or too large for fp16 scales.
    """
    num_rows, in_features = weight.shape
    blocks = np.empty((num_rows, Q8_0.row_bytes(in_features)), np.uint8)
    step = max(1, _CHUNK_VALUES // in_features)
    for start in range(0, num_rows, step):
        rows = weight[start : start + step].float()
        blocks[start : start + step] = _quantise_rows(rows, name)
    return blocks


def _quantise_rows(rows: Tensor, name: str) -> np.ndarray:
    groups = rows.reshape(-1, GROUP_SIZE)
    scales = groups.abs().amax(dim=1, keepdim=True) / 127
    _check_finite(scales, name)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    scaled = groups * inverse
    codes = scaled.trunc().add_(scaled.frac().mul_(2).trunc_()).to(torch.int8)
    stored = torch.cat([scales.half().view(torch.uint8), codes.view(torch.uint8)], dim=1)
    return stored.reshape(len(rows), -1).numpy()


def _check_finite(scales: Tensor, name: str) -> None:
    if bool((scales <= _LARGEST_SCALE).all()):  # false for NaN, too
        return
    if bool(scales.isfinite().all()):
        largest = float(scales.max()) * 127
        raise ConfigError(
            f"tensor {name} has the weight {largest:.3g}; Q8_0 holds at most "
            f"{_LARGEST_SCALE * 127:.3g}. Start with --quantization exact."
        )
    raise ConfigError(
        f"tensor {name} has weights that are NaN or infinite and cannot be quantised; the file is "
        "damaged. Download or convert it again."
    )
