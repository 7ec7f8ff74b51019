"""The decoder every family is a variant of, built from a ModelSpec.

The residual stream is one tensor, updated in place; taps copy it. Families override how a
configuration is read and how Hugging Face names their weights, nothing of the computation.
Shapes: T rows (num_tokens), d hidden_size, n tapped layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from forerun.attention.base import AttentionContext
from forerun.errors import ConfigError
from forerun.gguf_file import GGUFFile
from forerun.layers.crossover import measure_crossover
from forerun.layers.embedding import Embedding, Head
from forerun.layers.linear import Linear, StoredBlocks, WeightOptions, pack_linears
from forerun.layers.norm import RMSNorm
from forerun.layers.rotary import Rotary, Rotation
from forerun.models.base import ModelOutput
from forerun.models.gguf import read_gguf_fields
from forerun.models.hf_config import read_common_fields, read_rope
from forerun.models.layer import DecoderLayer, WeightSlot
from forerun.models.segments import Segments
from forerun.models.spec import Fields, LayerSpec, ModelSpec
from forerun.models.whole_step import Tables, WholeStep


class Taps:
    """Copies of the residual stream after chosen layers, [num_tokens, n, hidden_size]."""

    def __init__(self, residual: Tensor, target_layer_ids: Sequence[int]) -> None:
        self._residual = residual
        self._ids = target_layer_ids
        self.values: Tensor | None = None
        if target_layer_ids:
            self.values = residual.new_empty(
                len(residual), len(target_layer_ids), residual.shape[1]
            )

    def wants(self, layer_id: int) -> bool:
        """Return whether the stream after this layer (-1: the embeddings) is tapped."""
        return layer_id in self._ids

    def take(self, layer_id: int) -> None:
        """Copy the stream, which must hold all this layer adds, to the columns that want it."""
        columns = [column for column, wanted in enumerate(self._ids) if wanted == layer_id]
        if self.values is not None and columns:
            self.values[:, columns] = self._residual[:, None]


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
        table = Linear(spec.hidden_size, spec.vocab_size, options)
        self.embed = Embedding(table, options, scale=spec.embed_scale)
        layers = [DecoderLayer(spec, index, options) for index in range(spec.num_layers)]
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, options)
        if not spec.tie_word_embeddings:
            table = Linear(spec.hidden_size, spec.vocab_size, options)
        self.head = Head(table, softcap=spec.logit_softcap)
        self.segments: Segments | None = None
        self.whole_step: WholeStep | None = None
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
        logits_rows: range = range(0),
    ) -> ModelOutput:
        """Run all layers; see TargetModel.forward."""
        self._check_taps(target_layer_ids)
        few = self.plain_from is None or len(token_ids) < self.plain_from
        is_native = self.segments is not None and few
        if is_native and self.whole_step is not None:
            output = self.whole_step.run(
                token_ids, positions, attention, target_layer_ids, logits_rows
            )
            if output is not None:
                return output
        residual = self.embed(token_ids)
        rotations = [rope(positions, residual.dtype) for rope in self.ropes]
        taps = Taps(residual, target_layer_ids)
        run = self._run_segments if is_native else self._run_modules
        return ModelOutput(run(residual, rotations, attention, taps), taps.values)

    def _run_modules(
        self, residual: Tensor, rotations: list[Rotation], attention: AttentionContext, taps: Taps
    ) -> Tensor:
        """Return the final-normed rows, layer by layer."""
        update = None
        for index, layer in enumerate(self.layers):
            if taps.wants(index - 1) and update is not None:
                residual.add_(update)
                update = None
            taps.take(index - 1)
            update = layer(residual, update, rotations[self.rope_index[index]], attention)
        hidden: Tensor = self.norm(residual, update)
        return hidden

    def _run_segments(
        self, residual: Tensor, rotations: list[Rotation], attention: AttentionContext, taps: Taps
    ) -> Tensor:
        """Return the final-normed rows, from attention to attention."""
        assert self.segments is not None
        step = self.segments.start(residual)
        attended = None
        query, key, value = step.query, step.key, step.value
        for index, layer in enumerate(self.segments.attention_layers):
            step.run(index, attended, rotations[self.rope_index[index]])
            if taps.wants(index - 1):
                taps.take(index - 1)
            attended = attention.attend(query, key, value, layer)
        step.run(len(self.layers), attended, None)
        return step.normed

    def pack_weights(self, blocks: Mapping[Linear, StoredBlocks] | None = None) -> None:
        """Let linear layers hold their weights as the device computes fastest; once loaded.

        Layers with `blocks` take these instead of what they were filled with.
        """
        blocks = blocks or {}
        linears = [linear for layer in self.layers for linear in layer.linears()]
        tables = [self.head.table]
        if self.embed.table in blocks and self.embed.table is not self.head.table:
            tables.append(self.embed.table)
        pack_linears([*linears, *tables], blocks)
        self.prepare_native()
        for linear in linears:
            linear.pack_for_onednn()

    def prepare_native(self) -> None:
        """Let steps run in native calls where all weights allow it; once they are packed."""
        self.segments = Segments.build(self.layers, self.norm)
        if self.segments is not None:
            ropes = cast("Sequence[Rotary]", self.ropes)
            tables = Tables(self.embed, self.head)
            self.whole_step = WholeStep(self.segments, tables, ropes, self.rope_index)

    @property
    def plain_from(self) -> int | None:
        """From how many rows on linear layers are left to oneDNN; None: never."""
        return self.layers[0].attention.qkv.plain_from

    def switch_from(self, num_rows: int | None) -> None:
        """Leave linear layers of steps with this many rows to oneDNN; None: never."""
        for layer in self.layers:
            for linear in layer.linears():
                linear.plain_from = num_rows

    def measure_crossover(self) -> int | None:
        """Return from how many rows on that would be faster; None: from none.

        Quantised weights stay: oneDNN would multiply them with other activations.
        """
        linears = [linear for layer in self.layers for linear in layer.linears()]
        if any(linear.packed is None or linear.is_quantised for linear in linears):
            return None
        return measure_crossover(max(linears, key=lambda x: x.in_features * x.out_features))

    def count_weight_types(self) -> dict[str, int]:
        """Return how many numbers of linear layers and tables are held in which type."""
        counts: Counter[str] = Counter()
        for linear, _ in self.linear_parts():
            counts.update(linear.weight_types)
        return dict(counts)

    def linear_parts(self) -> Iterator[tuple[Linear, tuple[str, ...]]]:
        """Yield linear layers and tables with the local names of the weights that make them up."""
        for index, layer in enumerate(self.layers):
            for linear, parts in layer.linear_parts():
                yield linear, tuple(f"layers.{index}.{part}.weight" for part in parts)
        yield self.embed.table, ("embed.weight",)
        if not self.spec.tie_word_embeddings:
            yield self.head.table, ("head.weight",)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of final-normed rows."""
        return self.head(hidden_states)

    def slots(self) -> dict[str, WeightSlot]:
        """Return every stored tensor's slot by local name; a tied head has none of its own."""
        slots = {
            "embed.weight": WeightSlot.of(self.embed.table.plain_weight),
            "norm.weight": WeightSlot.of(self.norm.weight),
        }
        if not self.spec.tie_word_embeddings:
            slots["head.weight"] = WeightSlot.of(self.head.table.plain_weight)
        for index, layer in enumerate(self.layers):
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
