"""The decoder every family is a variant of, built from a ModelSpec.

The residual stream is one tensor, updated in place; taps copy it. Families override how a
configuration is read and how Hugging Face names their weights, nothing of the computation.
Shapes: T rows (num_tokens), d hidden_size, n tapped layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from forerun.attention.base import AttentionContext, AttentionLayer
from forerun.errors import ConfigError
from forerun.gguf_file import GGUFFile
from forerun.layers.attention import Attention
from forerun.layers.embedding import Embedding, Head
from forerun.layers.linear import Block, Linear, WeightOptions
from forerun.layers.mlp import GatedMLP
from forerun.layers.norm import RMSNorm
from forerun.layers.rotary import Rotary, Rotation
from forerun.models.base import ModelOutput
from forerun.models.gguf import read_gguf_fields
from forerun.models.hf_config import read_common_fields, read_rope
from forerun.models.spec import Fields, LayerSpec, ModelSpec


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


class DecoderModel(nn.Module):
    """A TargetModel. Subclasses are families; instances hold weights and no request state.

    `hf_names` maps local weight names to Hugging Face's. `hf_norm_offset` is what a family's stored
    norm weights lack (Gemma stores w and means 1 + w).
    """

    hf_names: ClassVar[dict[str, str]] = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "input_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm",
    }
    hf_norm_offset: ClassVar[float] = 0.0
    gguf_permutes_heads: ClassVar[bool] = False

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.spec = spec
        options = WeightOptions(dtype, torch.device(device))
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, options, scale=spec.embed_scale)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, index, options) for index in range(spec.num_layers)
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)
        tied = spec.tie_word_embeddings
        weight = self.embed.weight if tied else options.empty(spec.vocab_size, spec.hidden_size)
        self.head = Head(weight, softcap=spec.logit_softcap)
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self.rope_index = [ropes.index(layer.rope) for layer in spec.layers]
        self.ropes = nn.ModuleList(
            Rotary(spec.head_dim, r.theta, freq_factors=r.freq_factors, device=options.device)
            for r in ropes
        )

    @classmethod
    def spec_from_hf(cls, config: Fields) -> ModelSpec:
        """Read config.json; the default is a decoder with nothing special."""
        common = read_common_fields(config)
        layer = LayerSpec(window=None, rope=read_rope(config, common["head_dim"]))
        return ModelSpec(**common, layers=(layer,) * config.integer("num_hidden_layers"))

    @classmethod
    def spec_from_gguf(cls, file: GGUFFile) -> ModelSpec:
        """Read GGUF metadata; the default is a decoder with nothing special."""
        return ModelSpec(**read_gguf_fields(file))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: AttentionContext,
        target_layer_ids: Sequence[int] = (),
    ) -> ModelOutput:
        """Run all layers; see TargetModel.forward."""
        self._check_taps(target_layer_ids)
        residual = self.embed(token_ids)
        rotations = [rope(positions, residual.dtype) for rope in self.ropes]
        taps = None
        if target_layer_ids:
            taps = residual.new_empty(len(residual), len(target_layer_ids), residual.shape[1])
        update = None
        for index, layer in enumerate(self.layers):
            columns = [c for c, layer_id in enumerate(target_layer_ids) if layer_id == index - 1]
            if taps is not None and columns:
                if update is not None:
                    residual.add_(update)
                    update = None
                taps[:, columns] = residual[:, None]
            update = layer(residual, update, rotations[self.rope_index[index]], attention)
        return ModelOutput(self.norm(residual, update), taps)

    def prepack(self) -> None:
        """Let linear layers hold their weights as the device computes fastest; once loaded."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.prepack()

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of final-normed rows."""
        return self.head(hidden_states)

    def slots(self) -> dict[str, WeightSlot]:
        """Return every stored tensor's slot by local name; a tied head has none of its own."""
        slots = {
            "embed.weight": WeightSlot.of(self.embed.weight),
            "norm.weight": WeightSlot.of(self.norm.weight),
        }
        if not self.spec.tie_word_embeddings:
            slots["head.weight"] = WeightSlot.of(self.head.weight)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer), layer
            slots |= {f"layers.{index}.{name}": slot for name, slot in layer.slots()}
        return slots

    @classmethod
    def hf_name(cls, name: str) -> str:
        """Return Hugging Face's name of a local weight name."""
        outside = {
            "embed.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
            "head.weight": "lm_head.weight",
        }
        if name in outside:
            return outside[name]
        _, index, part, kind = name.split(".")
        return f"model.layers.{index}.{cls.hf_names[part]}.{kind}"

    def _check_taps(self, target_layer_ids: Sequence[int]) -> None:
        last = self.spec.num_layers - 2
        for layer_id in target_layer_ids:
            if not -1 <= layer_id <= last:
                raise ConfigError(
                    f"target_layer_ids holds {layer_id}; this model has taps -1 (embeddings) to "
                    f"{last} (the last layer cannot be tapped)."
                )
