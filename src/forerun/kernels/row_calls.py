"""How Python hands rows of float32 numbers to kernels: who can, which sizes, whose memory.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.kernels import Kernels, find_kernels


def find_usable(rows: Tensor, others: Tensor | None = None) -> Kernels | None:
    """Return the kernels if there are rows and the kernels can read them where they lie."""
    for given in (rows, rows if others is None else others):
        if not given.is_cpu or given.dtype != torch.float32 or given.stride(-1) != 1:
            return None
    return find_kernels() if len(rows) else None


def list_sizes(logits: Tensor) -> dict[str, int]:
    """Return the sizes of rows of logits [R, V] by their names in the structs."""
    num_rows, vocab_size = logits.shape
    return {"row_stride": logits.stride(0), "num_rows": num_rows, "vocab_size": vocab_size}


def call_kernel(
    function: Any,
    params: type[ctypes.Structure],
    tensors: Mapping[str, Tensor | np.ndarray | None],
    **sizes: int,
) -> None:
    """Call a kernel; `tensors` hold the memory it works on until it returns."""
    pointers = {
        name: given.ctypes.data if isinstance(given, np.ndarray) else given.data_ptr()
        for name, given in tensors.items()
        if given is not None
    }
    function(byref(params(**pointers, **sizes, num_threads=torch.get_num_threads())))
