"""The layers of a block drafter over the paged pool: a decoder whose block rows see one another.

The Qwen3 decoder (head norms), not causal, with the target's own embedding and a head over the
draft vocabulary: one pass over the blocks of all drafting requests is a step like any other, native
where kernels are. What rows see before their block are the K/V that context.py wrote.
Shapes: d hidden_size, V and Vd target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from forerun.drafters.dspark.config import DSparkConfig
from forerun.kernels.packed import measure_blocks
from forerun.layers.embedding import Embedding, Head
from forerun.layers.linear import Linear, StoredBlocks, WeightOptions, pack_linears
from forerun.models.decoder import DecoderModel
from forerun.models.spec import LayerSpec, ModelSpec, RopeSpec
from forerun.models.stored import fill
from forerun.quantisation.formats import GROUP_SIZE, Q8_0, BlockTensor
from forerun.quantisation.quantise import quantise

_TABLES = ("embed.weight", "head.weight")


def build_spec(config: DSparkConfig) -> ModelSpec:
    """Describe the draft layers as a decoder over the draft vocabulary."""
    rope = RopeSpec(theta=config.rope_theta, freq_factors=config.rope_freq_factors)
    layer = LayerSpec(window=None, rope=rope)
    return ModelSpec(
        architecture="DSpark",
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.draft_vocab_size,
        max_model_len=config.max_model_len,
        rms_norm_eps=config.rms_norm_eps,
        attention_scale=config.head_dim**-0.5,
        layers=(layer,) * config.num_layers,
        tie_word_embeddings=False,
        qk_norm=True,
        causal=False,
    )


class Backbone(DecoderModel):
    """Draft layers; `share_target` completes them. Until then embedding and head are untouched."""

    def __init__(
        self, config: DSparkConfig, options: WeightOptions, *, is_quantised: bool = False
    ) -> None:
        super().__init__(build_spec(config), options.dtype, options.device)
        self._options = options
        self._is_quantised = is_quantised
        self._has_own_head = False

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the weights of a checkpoint, by its names; an lm_head only if it has one."""
        for name, slot in self.slots().items():
            if name not in _TABLES:
                fill(slot, tensors[self.hf_name(name).removeprefix("model.")])
        if "lm_head.weight" in tensors:
            self.head.table.plain_weight.copy_(tensors["lm_head.weight"])
            self._has_own_head = True

    def list_linears(self) -> list[Linear]:
        """Return the linear layers that are filled, in the order of their use."""
        linears = [linear for layer in self.layers for linear in layer.linears()]
        return [*linears, self.head.table] if self._has_own_head else linears

    def share_target(self, target: DecoderModel, d2t: Tensor | None) -> None:
        """Use the target's embedding and, unless there is an own one, its head; then no more fits.

        `d2t` [Vd] are the head's rows; None: all of them, in the target's own memory.
        """
        self.embed = Embedding(target.embed.table, self._options, scale=None)
        if not self._has_own_head:
            self.head = Head(self._take_head(target.head.table, d2t), softcap=None)
        self.prepare_native()

    def _take_head(self, table: Linear, d2t: Tensor | None) -> Linear:
        if d2t is None:
            return table
        head = Linear(self.spec.hidden_size, len(d2t), self._options)
        head.plain_weight.copy_(table.read_rows(d2t))
        pack([head], is_quantised=self._is_quantised)
        return head


def pack(linears: Sequence[Linear], *, is_quantised: bool) -> None:
    """Let filled layers hold their weights as the device computes fastest, in Q8_0 if told so."""
    blocks: dict[Linear, StoredBlocks] = {}
    if is_quantised:
        fitting = (linear for linear in linears if linear.in_features % GROUP_SIZE == 0)
        blocks = {linear: _quantise(linear) for linear in fitting}
    pack_linears(linears, blocks)
    for linear in linears:
        linear.pack_for_onednn()


def _quantise(linear: Linear) -> StoredBlocks:
    """Return a filled weight in Q8_0; its rows are independent, so a merged one is one part."""
    tensor = BlockTensor(quantise(linear.plain_weight, "of the drafter"), Q8_0)
    return StoredBlocks(measure_blocks([tensor]), read=lambda: [tensor], done=_keep_nothing)


def _keep_nothing() -> None:
    """The blocks are memory of their own, free once they are copied."""
