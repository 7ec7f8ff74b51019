"""Stands in for measure_blocks and pack_blocks of kernels/packed.py until these land: no format."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kernels.packed import PackedMemory, PackedWeight
from forerun.quantisation.formats import BlockTensor


def measure_blocks(tensors: Sequence[BlockTensor]) -> int | None:
    """Return None: no format has a kernel yet."""
    del tensors
    return None


def pack_blocks(
    tensors: Sequence[BlockTensor], dtype: torch.dtype, memory: PackedMemory
) -> PackedWeight:
    """Refuse: nothing was measured that could be packed."""
    del dtype, memory
    raise ValueError(f"{len(tensors)} quantised tensors cannot be packed here")
