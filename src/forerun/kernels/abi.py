"""The C interface of the kernels: argument structs and function types, as in cpp/abi.h.

Sizes and strides count elements. ABI_VERSION rises with every change of a struct or signature, so
that an object built from other sources is refused instead of misread.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch

ABI_VERSION = 2
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class AttentionParams(ctypes.Structure):
    """One layer of one step; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "keys values query key value output workspace"),
        *_fields(c_void_p, "starts counts contexts tables slots"),
        *_fields(c_void_p, "first chunk_begin chunk_request partial_begin"),
        *_fields(c_int64, "query_stride key_stride value_stride"),
        *_fields(c_int64, "num_reqs num_chunks table_width max_count"),
        *_fields(c_int64, "num_heads num_kv_heads head_dim block_size chunk_size"),
        *_fields(c_int64, "window dtype num_threads"),
        ("scale", c_double),
    ]


class NormParams(ctypes.Structure):
    """RMS norm over [num_rows, num_heads, size]; `update`, if any, is added to x in place first."""

    _fields_ = [
        *_fields(c_void_p, "x update weight out"),
        *_fields(c_int64, "x_stride update_stride out_stride weight_stride"),
        *_fields(c_int64, "num_rows num_heads size"),
        *_fields(c_int64, "dtype num_threads"),
        ("eps", c_double),
    ]


class RotaryParams(ctypes.Structure):
    """Rotary embedding of [num_rows, num_heads, size] in place."""

    _fields_ = [
        *_fields(c_void_p, "x cosines sines"),
        *_fields(c_int64, "x_stride cos_stride sin_stride num_rows num_heads size"),
        *_fields(c_int64, "dtype num_threads"),
    ]


class GateParams(ctypes.Structure):
    """activation(gate) * up of rows [num_rows, 2 * size]."""

    _fields_ = [
        *_fields(c_void_p, "x out"),
        *_fields(c_int64, "num_rows size activation dtype num_threads"),
    ]


FUNCTIONS: dict[str, tuple[type[ctypes.Structure], type | None]] = {
    "forerun_attention_workspace": (AttentionParams, c_int64),
    "forerun_attention": (AttentionParams, None),
    "forerun_norm": (NormParams, None),
    "forerun_rotate": (RotaryParams, None),
    "forerun_gate": (GateParams, None),
}
