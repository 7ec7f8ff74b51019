"""Small operations between linear layers: native where possible, PyTorch otherwise.

The *_reference functions are the definition; the native ones compute the same in one pass. A native
operation needs the CPU, float32 or bfloat16, and rows whose numbers are dense.
Shapes: T rows, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from forerun.kernels import Kernels, find_kernels
from forerun.kernels.abi import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    GateParams,
    NormParams,
    RotaryParams,
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


def rms_norm(x: Tensor, weight: Tensor, eps: float, update: Tensor | None = None) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension, rounded once.

    `x` is [T, D] with weight [D], or [T, H, D] with one weight row per head; weights are float32.
    `update`, of the shape of x, is first added to x in place.
    """
    kernels = _find_usable(x)
    readable = update is None or (update.stride() == x.stride() and update.dtype == x.dtype)
    usable = weight.dtype == torch.float32 and weight.is_contiguous()
    if kernels is None or not readable or not usable:
        return rms_norm_reference(x, weight, eps, update)
    num_rows, *heads, size = x.shape
    num_heads = heads[0] if heads else 1
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    params = NormParams(
        x=x.data_ptr(),
        update=None if update is None else update.data_ptr(),
        weight=weight.data_ptr(),
        out=out.data_ptr(),
        x_stride=x.stride(0),
        update_stride=x.stride(0),
        out_stride=num_heads * size,
        weight_stride=size,
        num_rows=num_rows,
        num_heads=num_heads,
        size=size,
        dtype=DTYPE_CODES[x.dtype],
        num_threads=torch.get_num_threads(),
        eps=eps,
    )
    kernels.norm(byref(params))
    return out


def rms_norm_reference(
    x: Tensor, weight: Tensor, eps: float, update: Tensor | None = None
) -> Tensor:
    """Compute rms_norm in PyTorch."""
    if update is not None:
        x.add_(update)
    normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    return (normed * weight).to(x.dtype)


def rotate_heads(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (a, b) to (a cos - b sin, b cos + a sin), a and b being the halves of each head.

    `heads` [T, H, D] is used up: the result may be the same memory. `cos` is [T, 1, 1, D / 2],
    `sin` [T, 1, 2, D / 2] with the rows (-sin, sin).
    """
    kernels = _find_usable(heads)
    if kernels is None or cos.dtype != heads.dtype or not sin.is_contiguous():
        return rotate_heads_reference(heads, cos, sin)
    num_rows, num_heads, size = heads.shape
    params = RotaryParams(
        x=heads.data_ptr(),
        cosines=cos.data_ptr(),
        sines=sin.data_ptr() + size // 2 * sin.itemsize,
        x_stride=heads.stride(0),
        cos_stride=size // 2,
        sin_stride=size,
        num_rows=num_rows,
        num_heads=num_heads,
        size=size,
        dtype=DTYPE_CODES[heads.dtype],
        num_threads=torch.get_num_threads(),
    )
    kernels.rotate(byref(params))
    return heads


def rotate_heads_reference(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute rotate_heads in PyTorch; returns a contiguous tensor."""
    num_rows, num_heads, size = heads.shape
    halves = heads.view(num_rows, num_heads, 2, size // 2)
    rotated = halves * cos
    return rotated.addcmul_(halves.flip(2), sin).view(num_rows, num_heads, size)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) * up, given both side by side as [T, 2 * size]."""
    kernels = _find_usable(gate_up)
    if kernels is None or not gate_up.is_contiguous():
        return gate_reference(gate_up, activation)
    num_rows, width = gate_up.shape
    size = width // 2
    out = gate_up.new_empty(num_rows, size)
    params = GateParams(
        x=gate_up.data_ptr(),
        out=out.data_ptr(),
        num_rows=num_rows,
        size=size,
        activation=ACTIVATION_CODES[activation],
        dtype=DTYPE_CODES[gate_up.dtype],
        num_threads=torch.get_num_threads(),
    )
    kernels.gate(byref(params))
    return out


def gate_reference(gate_up: Tensor, activation: str) -> Tensor:
    """Compute gate in PyTorch."""
    gate_rows, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate_rows).mul_(up)


def _find_usable(x: Tensor) -> Kernels | None:
    """Return the kernels if they can read these rows [T, D] or [T, H, D] where they lie."""
    if not x.is_cpu or x.dtype not in DTYPE_CODES or x.stride(-1) != 1:
        return None
    if x.dim() == 3 and x.shape[1] > 1 and x.stride(1) != x.shape[2]:
        return None
    return find_kernels()
