"""A new drafter for a target: its sizes, its draft vocabulary, and the weights it starts from.

Its layers have the target's shape, so `init = target` can start them as copies of the target's last
layers, behind a projection that passes on the deepest tap. What such layers lack is the norm of
heads; its weights get the size those heads have on data.
Shapes: T rows, d hidden_size, D head_dim, V target and Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from forerun.drafters.dspark.block_layer import BlockAttention
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.network import DSparkNetwork
from forerun.errors import ConfigError
from forerun.models.decoder import DecoderModel
from forerun.models.loader import load_model, read_model_spec
from forerun.models.spec import ModelSpec
from forerun.training.answers.dataset import Dataset
from forerun.training.answers.shards import Manifest, TargetSequence
from forerun.training.answers.target import compute_lse
from forerun.training.settings import TrainSettings

# Another model's heads, or another quantisation, give sums that differ by whole units.
_MAX_LSE_ERROR = 0.5
_CHECKED_ROWS = 64
_COPIED_PARTS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


class Target:
    """The target's description and plain weights, checked against the data made with it."""

    def __init__(self, path: Path, dataset: Dataset) -> None:
        self.spec = read_model_spec(path)
        check_same_target(path, self.spec, dataset.manifest)
        self.model: DecoderModel = load_model(path, dtype=torch.bfloat16, pack=False)
        sequence = dataset.draw(0, 1)[0]
        _check_same_head(path, self.head, sequence)

    @property
    def embed(self) -> Tensor:
        """The embeddings [V, d]."""
        return self.model.embed.table.plain_weight.data

    @property
    def head(self) -> Tensor:
        """The output head [V, d]."""
        return self.model.head.table.plain_weight.data


def check_same_target(path: Path, spec: ModelSpec, manifest: Manifest) -> None:
    """Raise ConfigError unless the model can be the one the data was made with."""
    for name in ("hidden_size", "vocab_size"):
        own, recorded = getattr(spec, name), getattr(manifest, name)
        if own != recorded:
            raise ConfigError(
                f"the data was made with {manifest.model} ({name} {recorded}), {path} has {own}; "
                "give the target of the data."
            )
    if spec.logit_softcap is not None:
        raise ConfigError(
            f"{path} caps its logits, which training does not model; give another target."
        )


def _check_same_head(path: Path, head: Tensor, sequence: TargetSequence) -> None:
    """Refuse a model of the same sizes whose head is not the one that made the data."""
    rows = slice(0, _CHECKED_ROWS)
    answer = sequence.token_ids[sequence.prompt_len :]
    own = compute_lse(sequence.hidden[rows], head, answer[rows])
    error = float((own - sequence.target_lse[rows]).abs().median())
    if not error <= _MAX_LSE_ERROR:
        raise ConfigError(
            f"{path} is not the target the data was made with: its logits differ (log-normaliser "
            f"off by {error:.2f}); give the target of the data."
        )


def build_config(
    spec: ModelSpec, manifest: Manifest, settings: TrainSettings, mask_token_id: int
) -> DSparkConfig:
    """Return a drafter of the target's layer shape; raises ConfigError."""
    rope = spec.layers[-1].rope
    return DSparkConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_theta=rope.theta,
        rope_freq_factors=rope.freq_factors,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        draft_vocab_size=min(settings.draft_vocab_size, spec.vocab_size),
        block_size=settings.block_size,
        target_layer_ids=manifest.target_layer_ids,
        mask_token_id=mask_token_id,
        markov_rank=settings.markov_rank,
        markov_head_type=settings.markov_head_type,
        has_confidence_head=settings.confidence_head,
        confidence_with_markov=settings.markov_rank > 0,
        verifier=manifest.model,
    )


def choose_draft_vocabulary(counts: Tensor, required: Sequence[int], size: int) -> Tensor:
    """Return the most frequent token ids and the required ones [size], rising."""
    ranks = counts.clone()
    ranks[list(required)] = int(counts.max()) + 1
    # A stable sort makes the choice among equals the lower id.
    return ranks.argsort(descending=True, stable=True)[:size].sort().values


def choose_mask_token(counts: Tensor, required: Sequence[int]) -> int:
    """Return the first token that no answer contains; the rarest if there is none."""
    ranks = counts.clone()
    ranks[list(required)] += 1
    return int(ranks.argmin())


def build_network(target: Target, dataset: Dataset, settings: TrainSettings) -> DSparkNetwork:
    """Return a network with fresh weights that follow from the seed, ready to train."""
    counts = dataset.count_tokens()
    required = [token for token in target.spec.eos_token_ids if token < len(counts)]
    mask = settings.mask_token_id
    if mask is None:
        mask = choose_mask_token(counts, required)
    config = build_config(target.spec, dataset.manifest, settings, mask)
    torch.manual_seed(settings.seed)
    network = DSparkNetwork(config)
    _scale_residual_outputs(network)
    if config.has_reduced_vocab:
        chosen = choose_draft_vocabulary(counts, required, config.draft_vocab_size)
        network.set_draft_vocabulary(chosen)
    network.share_target(target.embed, target.head)
    if settings.init == "target":
        copy_target_layers(network, target.model, dataset.draw(0, 1)[0].features)
    return network


def _scale_residual_outputs(network: DSparkNetwork) -> None:
    """Shrink what layers add to the residual stream, so that depth does not make it grow."""
    scale = (2 * network.config.num_layers) ** -0.5
    for name, param in network.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            param.data.mul_(scale)


@torch.no_grad()
def copy_target_layers(network: DSparkNetwork, model: DecoderModel, features: Tensor) -> None:
    """Start from the target's last layers; `features` [T, n * d] are some of its taps."""
    config, slots = network.config, model.slots()
    first = model.spec.num_layers - config.num_layers
    if first < 0 or model.spec.qkv_bias or model.spec.post_norms:
        raise ConfigError(
            f"init target needs a target of at least {config.num_layers} layers without q/k/v "
            "biases and without norms on what layers add; give --init random."
        )
    params = dict(network.named_parameters())
    for layer in range(config.num_layers):
        for local, name in _COPIED_PARTS.items():
            source = slots[f"layers.{first + layer}.{local}.weight"].destination
            params[f"layers.{layer}.{name}.weight"].copy_(source)
    size = config.hidden_size
    network.fc.weight.zero_()
    network.fc.weight[:, -size:].copy_(torch.eye(size))
    network.hidden_norm.weight.copy_(params["layers.0.input_layernorm.weight"])
    network.norm.weight.copy_(slots["norm.weight"].destination)
    _fit_head_norms(network, network.project_context(features.float()))


def _fit_head_norms(network: DSparkNetwork, context: Tensor) -> None:
    """Give head norms the root mean square of the heads that copied projections make of data."""
    for layer in network.layers:
        attention = cast("BlockAttention", layer.self_attn)
        for norm, proj in (
            (attention.q_norm, attention.q_proj),
            (attention.k_norm, attention.k_proj),
        ):
            heads = proj(context).unflatten(-1, (-1, attention.head_dim))
            norm.weight.fill_(float(heads.square().mean(-1).sqrt().mean()))
