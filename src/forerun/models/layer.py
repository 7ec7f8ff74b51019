"""One decoder layer, and where its stored weights go.

The residual stream is one tensor, updated in place; a layer returns what the next one adds to it.
Shapes: T rows (num_tokens), d hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from forerun.attention.base import AttentionContext, AttentionLayer
from forerun.layers.attention import Attention
from forerun.layers.linear import Block, Linear, WeightOptions
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm
from forerun.layers.rotary import Rotation
from forerun.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where one stored tensor goes.

    `shape` is the stored shape. `destination` has as many numbers (a view of a merged or reordered
    weight) or one more leading dimension, over which the tensor is repeated.
    """

    destination: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, destination: Tensor) -> WeightSlot:
        """Return the slot of a tensor stored exactly as it is held."""
        return cls(destination, tuple(destination.shape))


class DecoderLayer(Block):
    """Attention and MLP around the residual stream, with or without norms on their outputs."""

    def __init__(self, spec: ModelSpec, index: int, options: WeightOptions) -> None:
        super().__init__()
        layer = AttentionLayer(
            index=index,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=spec.layers[index].window,
            causal=spec.causal,
        )
        self.attention = Attention(
            spec.hidden_size,
            layer,
            options,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            head_norm_eps=spec.rms_norm_eps if spec.qk_norm else None,
        )
        self.mlp = GatedMLP(
            spec.hidden_size,
            spec.intermediate_size,
            options,
            activation=spec.activation,
            bias=spec.mlp_bias,
        )
        self.input_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)
        self.post_attention_norm = self.post_mlp_norm = None
        if spec.post_norms:
            self.post_attention_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)
            self.post_mlp_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)

    def forward(
        self,
        residual: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        attention: AttentionContext,
    ) -> Tensor:
        """Add the layer before's update to the residual stream and return this layer's.

        Both are [num_tokens, hidden_size]. A norm adds the update it is about to read: one pass.
        """
        hidden = self.attention(self.input_norm(residual, update), rotation, attention)
        if self.post_attention_norm is not None:
            hidden = self.post_attention_norm(hidden)
        hidden = self.mlp(self.mlp_norm(residual, hidden))
        return hidden if self.post_mlp_norm is None else self.post_mlp_norm(hidden)

    def slots(self) -> Iterator[tuple[str, WeightSlot]]:
        """Yield (local name, slot) of every stored tensor of this layer."""
        attention, mlp = self.attention, self.mlp
        layer = attention.layer
        kv_size = layer.num_kv_heads * layer.head_dim
        q, k, v = attention.qkv.split([layer.num_heads * layer.head_dim, kv_size, kv_size])
        gate, up = mlp.gate_up.split([mlp.intermediate_size] * 2)
        (o,), (down,) = (part.split([part.out_features]) for part in (attention.o, mlp.down))
        parts = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
        for name, tensors in parts.items():
            for kind, tensor in tensors.items():
                yield f"{name}.{kind}", WeightSlot.of(tensor)
        for name in ("input_norm", "mlp_norm", "post_attention_norm", "post_mlp_norm"):
            norm = getattr(self, name)
            if norm is not None:
                yield f"{name}.weight", WeightSlot.of(norm.weight)
        if attention.head_norm is not None:
            weight, shape = attention.head_norm.weight, (layer.head_dim,)
            yield "q_norm.weight", WeightSlot(weight[: layer.num_heads], shape)
            yield "k_norm.weight", WeightSlot(weight[layer.num_heads :], shape)

    def linear_parts(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield the linear layers in the order of their use, and the names of their parts."""
        yield self.attention.qkv, ("q", "k", "v")
        yield self.attention.o, ("o",)
        yield self.mlp.gate_up, ("gate", "up")
        yield self.mlp.down, ("down",)

    def linears(self) -> Iterator[Linear]:
        """Yield the linear layers in the order of their use."""
        return (linear for linear, _ in self.linear_parts())
