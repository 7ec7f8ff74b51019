"""The decoder in native segments: from the attention of a layer to that of the next.

A segment finishes one layer (o, norms, MLP) and begins another (norm, q, k and v, rotation). With
native attention a whole step is one call, see whole_step.py; with another backend a layer is two.
Segments compute bit for bit what the modules compute one by one with native linear layers: these
own the weights, segments only point at them.
Shapes: T rows of the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.kernels import Kernels, find_kernels
from forerun.kernels.abi import (
    ACTIVATION_CODES,
    DTYPE_CODES,
    PackedWeight,
    SegmentParams,
    SegmentWeights,
)
from forerun.layers.linear import Linear
from forerun.layers.norm import HeadNorm, RMSNorm
from forerun.layers.rotary import Rotation
from forerun.models.layer import DecoderLayer
from forerun.quantisation.reference import ReferenceWeight

# Gate and up outputs of one number must meet in a panel: whole vectors, of any instruction set.
_GATE_MULTIPLE = 16


class Segments:
    """Pointers into the weights of a packed decoder; keeps its modules alive."""

    def __init__(self, kernels: Kernels, layers: Sequence[DecoderLayer], norm: RMSNorm) -> None:
        self.kernels = kernels
        self._modules = (layers, norm)
        before, after = [None, *layers], [*layers, None]
        self._weights = [_describe(a, b, norm) for a, b in zip(before, after, strict=True)]
        self.addresses = [ctypes.addressof(weights) for weights in self._weights]
        first = layers[0]
        self.layer = first.attention.layer
        self.attention_layers = [layer.attention.layer for layer in layers]
        self.hidden_size = first.attention.qkv.in_features
        self.heads_size = first.attention.qkv.out_features
        self.gate_size = first.mlp.intermediate_size
        self.widest = max(first.attention.o.in_features, self.gate_size, self.hidden_size)

    @classmethod
    def build(cls, layers: Sequence[DecoderLayer], norm: RMSNorm) -> Segments | None:
        """Return the segments of these layers, or None if the kernel cannot compute them."""
        kernels = find_kernels()
        if kernels is None or not all(_is_packed(layer) for layer in layers):
            return None
        return cls(kernels, layers, norm)

    def start(self, residual: Tensor) -> StepSegments:
        """Return the segments of one step; `residual` [T, hidden_size] is updated in place."""
        return StepSegments(self, residual)


class StepSegments:
    """One step's rows and scratch memory.

    `query`, `key` and `value` [T, heads, head_dim] are views of one buffer that every segment but
    the last fills anew; `normed` [T, hidden_size] is the result of the last.
    """

    def __init__(self, segments: Segments, residual: Tensor) -> None:
        def scratch(width: int) -> Tensor:
            return residual.new_empty(len(residual), width)

        layer = segments.layer
        self._segments = segments
        self._kernels = segments.kernels
        heads = scratch(segments.heads_size).view(len(residual), -1, layer.head_dim)
        sizes = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        self.query, self.key, self.value = heads.split(sizes, dim=1)
        self.normed = scratch(segments.hidden_size)
        update, gated = scratch(segments.hidden_size), scratch(segments.gate_size)
        tiles = scratch(segments.widest)
        self._memory = (residual, update, gated, tiles)
        self._rotation: Rotation | None = None
        self._params = SegmentParams(
            residual=residual.data_ptr(),
            update=update.data_ptr(),
            normed=self.normed.data_ptr(),
            gated=gated.data_ptr(),
            heads=heads.data_ptr(),
            scratch=tiles.data_ptr(),
            num_rows=len(residual),
            dtype=DTYPE_CODES[residual.dtype],
            cos_stride=layer.head_dim // 2,
            sin_stride=layer.head_dim,
            num_threads=torch.get_num_threads(),
        )
        self._pointer = ctypes.byref(self._params)

    def run(self, index: int, attended: Tensor | None, rotation: Rotation | None) -> None:
        """Run segment `index`, which begins layer `index` or, after the last one, ends the step."""
        params = self._params
        params.weights = self._segments.addresses[index]
        if attended is not None:
            params.attended = attended.data_ptr()
        if rotation is not self._rotation and rotation is not None:
            params.cosines, params.sines = find_angles(rotation)
            self._rotation = rotation
        self._kernels.segment(self._pointer)


def find_angles(rotation: Rotation) -> tuple[int, int]:
    """Return where cosines and positive sines begin."""
    half = rotation.cos.shape[-1]
    return rotation.cos.data_ptr(), rotation.sin.data_ptr() + half * rotation.sin.itemsize


def _is_packed(layer: DecoderLayer) -> bool:
    linears = list(layer.linears())
    return (
        not any(isinstance(linear.packed, ReferenceWeight | None) for linear in linears)
        and len({linear.dtype for linear in linears}) == 1
        and layer.mlp.intermediate_size % _GATE_MULTIPLE == 0
    )


def _describe(
    before: DecoderLayer | None, after: DecoderLayer | None, norm: RMSNorm
) -> SegmentWeights:
    """Return the segment that ends layer `before` and begins layer `after`; None: there is none."""
    input_norm = norm if after is None else after.input_norm
    weights = SegmentWeights(
        input_norm=input_norm.weight.data_ptr(),
        hidden_size=len(input_norm.weight),
        eps=input_norm.eps,
    )
    if before is not None:
        weights.o = _describe_linear(before.attention.o)
        weights.gate_up = _describe_linear(before.mlp.gate_up)
        weights.down = _describe_linear(before.mlp.down)
        weights.mlp_norm = before.mlp_norm.weight.data_ptr()
        weights.post_attention_norm = _find_weight(before.post_attention_norm)
        weights.post_mlp_norm = _find_weight(before.post_mlp_norm)
        weights.activation = ACTIVATION_CODES[before.mlp.activation]
    if after is not None:
        weights.qkv = _describe_linear(after.attention.qkv)
        weights.head_norm = _find_weight(after.attention.head_norm)
        weights.num_rotated_heads = after.attention.num_rotated
        weights.head_dim = after.attention.layer.head_dim
    return weights


def _describe_linear(linear: Linear) -> PackedWeight:
    assert not isinstance(linear.packed, ReferenceWeight | None)
    return linear.packed.describe(linear.packed_bias)


def _find_weight(norm: RMSNorm | HeadNorm | None) -> int | None:
    return None if norm is None else norm.weight.data_ptr()
