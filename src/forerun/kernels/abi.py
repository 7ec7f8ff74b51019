"""The C interface of the kernels: argument structs and function types, as in cpp/abi.h.

Sizes and strides count elements. ABI_VERSION rises with every change of a struct or signature, so
that an object built from other sources is refused instead of misread.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p

import torch

ABI_VERSION = 6
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1}


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class AttentionParams(ctypes.Structure):
    """One layer of one step; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "keys values key_scales value_scales"),
        *_fields(c_void_p, "query key value output workspace"),
        *_fields(c_void_p, "starts counts contexts ends tables slots"),
        *_fields(c_void_p, "first chunk_begin chunk_owner partial_begin"),
        *_fields(c_int64, "query_stride key_stride value_stride"),
        *_fields(c_int64, "num_rows num_blocks num_shared max_private_chunks"),
        *_fields(c_int64, "table_width max_count"),
        *_fields(c_int64, "num_heads num_kv_heads head_dim block_size chunk_size"),
        *_fields(c_int64, "window causal dtype num_threads"),
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


class ArgmaxParams(ctypes.Structure):
    """The largest number of every row and its index."""

    _fields_ = [
        *_fields(c_void_p, "x indices values"),
        *_fields(c_int64, "row_stride num_rows size num_threads"),
    ]


class WeightPart(ctypes.Structure):
    """Outputs of a weight from number `begin` on; format 0 is numbers of the model's type."""

    _fields_ = [("panels", c_void_p), *_fields(c_int64, "format begin")]


MAX_PARTS = 3


class PackedWeight(ctypes.Structure):
    """A weight in panels and its float32 bias."""

    _fields_ = [
        ("parts", WeightPart * MAX_PARTS),
        ("num_parts", c_int64),
        ("bias", c_void_p),
        *_fields(c_int64, "out_features in_features"),
    ]


class PackParams(ctypes.Structure):
    """Packing of a weight [out_features, in_features]."""

    _fields_ = [
        *_fields(c_void_p, "weight panels"),
        *_fields(c_int64, "out_features in_features dtype num_threads"),
    ]


class PackBlocksParams(ctypes.Structure):
    """Packing of stored blocks of one format, rows [out_features, in_features]."""

    _fields_ = [
        *_fields(c_void_p, "blocks panels"),
        *_fields(c_int64, "format out_features in_features num_threads"),
    ]


class UnpackParams(ctypes.Structure):
    """Reading rows of a packed weight."""

    _fields_ = [
        ("weight", PackedWeight),
        *_fields(c_void_p, "row_ids out"),
        *_fields(c_int64, "num_rows dtype num_threads"),
    ]


class LinearParams(ctypes.Structure):
    """x W^T + b over rows [num_rows, in_features]."""

    _fields_ = [
        ("weight", PackedWeight),
        *_fields(c_void_p, "x out scratch"),
        *_fields(c_int64, "x_stride num_rows out_dtype dtype num_threads"),
    ]


class SegmentWeights(ctypes.Structure):
    """The weights between two attentions; see cpp/abi.h."""

    _fields_ = [
        *((name, PackedWeight) for name in ("o", "gate_up", "down", "qkv")),
        *_fields(c_void_p, "post_attention_norm mlp_norm post_mlp_norm input_norm head_norm"),
        *_fields(c_int64, "hidden_size num_rotated_heads head_dim activation"),
        ("eps", c_double),
    ]


class SegmentParams(ctypes.Structure):
    """The rows of one step on their way through a segment; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "weights attended residual update normed gated heads scratch"),
        *_fields(c_void_p, "cosines sines positions"),
        *_fields(c_int64, "cos_stride sin_stride num_rows dtype num_threads"),
    ]


class SampleParams(ctypes.Structure):
    """Coupled samples of rows of logits; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "logits temperature keys scores slice_ids token_ids"),
        *_fields(c_int64, "row_stride num_rows vocab_size num_slices num_threads"),
    ]


class SampleListedParams(ctypes.Structure):
    """Coupled samples of rows of candidates; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "probs listed_ids keys token_ids"),
        *_fields(c_int64, "probs_stride ids_stride num_rows width num_threads"),
    ]


class MeasureParams(ctypes.Structure):
    """Peak and normaliser of rows of logits; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "logits temperature tile_peaks tile_probs peaks peak_probs"),
        *_fields(c_int64, "row_stride num_rows vocab_size num_threads"),
    ]


class DrawParams(ctypes.Structure):
    """Draws by inverse distribution function; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "logits temperature peaks peak_probs tile_probs left_out"),
        *_fields(c_void_p, "rows left_out_ids left_out_rows uniforms tile_sums token_ids"),
        *_fields(c_int64, "row_stride left_out_stride num_draws vocab_size num_threads"),
    ]


class DrawListedParams(ctypes.Structure):
    """Draws from rows of candidates; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "probs listed_ids left_out"),
        *_fields(c_void_p, "rows left_out_ids left_out_rows uniforms token_ids"),
        *_fields(c_int64, "probs_stride ids_stride left_out_stride num_draws width num_threads"),
    ]


class CutParams(ctypes.Structure):
    """Top-k, top-p and min-p; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "logits temperature peaks peak_probs"),
        *_fields(c_void_p, "rows top_k top_p min_p"),
        *_fields(c_void_p, "token_ids probs num_kept last_ids last_logits scratch"),
        *_fields(c_int64, "row_stride num_rows vocab_size capacity num_threads"),
    ]


class MaskParams(ctypes.Structure):
    """Rows of logits without the tokens after a last one; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "logits rows last_ids last_logits out"),
        *_fields(c_int64, "row_stride num_rows vocab_size num_threads"),
    ]


class ForwardParams(ctypes.Structure):
    """All layers of one step; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "segment embedding token_ids"),
        *_fields(c_void_p, "weights attention keys values key_scales value_scales"),
        *_fields(c_void_p, "cosines sines attended taps tap_ids head logits"),
        *_fields(c_int64, "first_logits_row num_logits_rows num_layers num_positions num_taps"),
        ("embed_scale", c_double),
    ]


# What forward, draft and ingest answer.
UNKNOWN_TOKEN, UNKNOWN_POSITION = 1, 2


class DraftParams(ctypes.Structure):
    """The sequential head of a block drafter; see cpp/abi.h."""

    _fields_ = [
        ("bias_table", PackedWeight),
        *_fields(c_void_p, "embedding base anchor_ids target_ids hidden confidence_weight"),
        *_fields(c_void_p, "token_ids confidence scratch"),
        *_fields(c_int64, "row_stride position_stride num_rows num_positions"),
        *_fields(c_int64, "vocab_size hidden_size reads_embedding dtype hidden_dtype num_threads"),
        ("confidence_bias", c_double),
    ]


class IngestParams(ctypes.Structure):
    """Taps to K/V of a block drafter's layers; see cpp/abi.h."""

    _fields_ = [
        ("fc", PackedWeight),
        ("key_value", PackedWeight),
        *_fields(c_void_p, "hidden_norm key_norm features fused heads scratch positions slots"),
        *_fields(c_void_p, "cosines sines keys values key_scales value_scales"),
        *_fields(c_int64, "cos_stride sin_stride num_positions"),
        *_fields(c_int64, "num_rows num_layers num_kv_heads head_dim block_size"),
        *_fields(c_int64, "dtype num_threads"),
        ("eps", c_double),
    ]


class StepLayoutParams(ctypes.Structure):
    """Positions, slots and block tables of a step's rows."""

    _fields_ = [
        *_fields(c_void_p, "counts contexts table_begin blocks"),
        *_fields(c_void_p, "query_start positions slots tables"),
        *_fields(c_int64, "num_requests table_width block_size"),
    ]


class AttentionPlanParams(ctypes.Structure):
    """How attention over a step's rows is cut; see cpp/abi.h."""

    _fields_ = [
        *_fields(c_void_p, "attention query_start contexts tables memory"),
        *_fields(c_int64, "capacity num_requests block_rows"),
    ]


FUNCTIONS: dict[str, tuple[type[ctypes.Structure], type | None]] = {
    "forerun_attention_workspace": (AttentionParams, c_int64),
    "forerun_attention": (AttentionParams, None),
    "forerun_norm": (NormParams, None),
    "forerun_rotate": (RotaryParams, None),
    "forerun_gate": (GateParams, None),
    "forerun_argmax": (ArgmaxParams, None),
    "forerun_packed_bytes": (PackParams, c_int64),
    "forerun_pack": (PackParams, None),
    "forerun_block_bytes": (PackBlocksParams, c_int64),
    "forerun_pack_blocks": (PackBlocksParams, None),
    "forerun_unpack": (UnpackParams, c_int64),
    "forerun_linear": (LinearParams, None),
    "forerun_segment": (SegmentParams, None),
    "forerun_forward": (ForwardParams, c_int64),
    "forerun_draft_bytes": (DraftParams, c_int64),
    "forerun_draft": (DraftParams, c_int64),
    "forerun_ingest": (IngestParams, c_int64),
    "forerun_lay_out": (StepLayoutParams, c_int64),
    "forerun_plan_attention": (AttentionPlanParams, c_int64),
    "forerun_sample": (SampleParams, None),
    "forerun_sample_listed": (SampleListedParams, None),
    "forerun_measure": (MeasureParams, None),
    "forerun_draw": (DrawParams, None),
    "forerun_draw_listed": (DrawListedParams, None),
    "forerun_cut": (CutParams, None),
    "forerun_mask_tail": (MaskParams, None),
}
