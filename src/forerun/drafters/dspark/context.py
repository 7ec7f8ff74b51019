"""What a block drafter knows of committed tokens: target taps, as K/V of its layers in the pool.

fc and hidden_norm fuse the taps of a row once; the K and V projections of all draft layers, merged
into one, make its keys and values, which are normed and rotated and written to the row's slot.
The context passes no attention and no MLP (DSpark, section 3.1), so this is all there is to ingest,
and it depends on the row alone: acceptance, prefix hits and preemption need no repair.
Shapes: T rows, n taps, d hidden_size, L layers, H KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forerun.attention.base import AttentionContext
from forerun.attention.native import NativeMetadata
from forerun.cache.kv_store import KVStore
from forerun.drafters.dspark.config import DSparkConfig
from forerun.kernels.ingest_ops import ContextWeights, ContextWriter
from forerun.kernels.ops import rms_norm
from forerun.kernels.packed import PackedWeight
from forerun.layers.linear import Linear, WeightOptions
from forerun.layers.norm import RMSNorm
from forerun.layers.rotary import Rotary, Rotation, apply_rotary, split_angles


class ContextProjection(nn.Module):
    """Taps to keys and values of all layers; keys of all layers come first, layer by layer."""

    def __init__(self, config: DSparkConfig, options: WeightOptions) -> None:
        super().__init__()
        self.num_layers, self.num_kv_heads = config.num_layers, config.num_kv_heads
        self.head_dim, self._eps = config.head_dim, config.rms_norm_eps
        width = config.hidden_size
        num_heads = config.num_layers * config.num_kv_heads
        self.fc = Linear(len(config.target_layer_ids) * width, width, options)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps, options)
        self.key_value = Linear(width, 2 * num_heads * config.head_dim, options)
        self.key_norm = options.empty(num_heads, config.head_dim, dtype=torch.float32)
        self._writer: ContextWriter | None = None

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint, by its names."""

        def gather(name: str) -> list[Tensor]:
            return [tensors[f"layers.{i}.self_attn.{name}.weight"] for i in range(self.num_layers)]

        self.fc.plain_weight.copy_(tensors["fc.weight"])
        self.hidden_norm.weight.copy_(tensors["hidden_norm.weight"])
        self.key_value.plain_weight.copy_(torch.cat(gather("k_proj") + gather("v_proj")))
        norms = torch.stack(gather("k_norm"))
        self.key_norm.copy_(norms.repeat_interleave(self.num_kv_heads, dim=0))

    def list_linears(self) -> list[Linear]:
        """Return the linear layers in the order of their use."""
        return [self.fc, self.key_value]

    def forward(self, features: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys and values [T, L * H, D] of rows [T, n * d]."""
        fused = self.hidden_norm(self.fc(features))
        heads = self.key_value(fused).view(len(features), -1, self.head_dim)
        keys, values = heads.chunk(2, dim=1)
        return apply_rotary(rms_norm(keys, self.key_norm, self._eps), rotation), values

    def prepare_native(self, kv_store: KVStore) -> None:
        """Let rows of the CPU go to these layers of the pool in one call, where that is possible.

        `kv_store` holds the drafter's own layers; once weights are packed.
        """
        fc, key_value = self.fc.packed, self.key_value.packed
        if isinstance(fc, PackedWeight) and isinstance(key_value, PackedWeight):
            weights = ContextWeights(
                fc=fc,
                key_value=key_value,
                hidden_norm=self.hidden_norm.weight,
                key_norm=self.key_norm,
                eps=self._eps,
            )
            self._writer = ContextWriter.build(weights, kv_store)

    def ingest(
        self, features: Tensor, positions: Tensor, rope: Rotary, attention: AttentionContext
    ) -> None:
        """Write K/V of a step's rows; `attention` is of the drafter's own layers."""
        metadata = attention.metadata
        if self._writer is None or not isinstance(metadata, NativeMetadata):
            self._write(features, rope(positions, features.dtype), attention)
            return
        table = rope.find_table(int(positions.max()), features.dtype)
        self._writer.write(features, positions, metadata.batch.slot_mapping, split_angles(table))

    def _write(self, features: Tensor, rotation: Rotation, attention: AttentionContext) -> None:
        keys, values = self.forward(features, rotation)
        by_layer = (x.split(self.num_kv_heads, dim=1) for x in (keys, values))
        for index, (key, value) in enumerate(zip(*by_layer, strict=True)):
            attention.write(key, value, index)
