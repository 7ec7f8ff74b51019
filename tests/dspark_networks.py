"""Small block drafters with lively random weights, batches for them, and a naive twin."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.network import BlockBatch, DSparkNetwork

WEIGHTS = "model.safetensors"


def make_config(**changes: object) -> DSparkConfig:
    fields: dict[str, object] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_model_len": 256,
        "vocab_size": 61,
        "draft_vocab_size": 61,
        "block_size": 5,
        "target_layer_ids": (-1, 1, 3),
        "mask_token_id": 7,
        "markov_rank": 6,
        "has_confidence_head": True,
    }
    return DSparkConfig(**(fields | changes))


def make_network(config: DSparkConfig | None = None, *, seed: int = 0) -> DSparkNetwork:
    """Return a network whose every weight matters: nothing is near zero or one."""
    torch.manual_seed(seed)
    network = DSparkNetwork(config or make_config())
    for name, weight in network.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        else:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    for name, number in network.named_buffers():
        if name.endswith("layer_scalar"):
            number.fill_(0.8)
    if network.config.has_reduced_vocab:
        size = network.config.draft_vocab_size
        chosen = torch.randperm(network.config.vocab_size)[:size]
        network.set_draft_vocabulary(chosen.sort().values)
    return network


def make_batch(
    config: DSparkConfig,
    *,
    lengths: Sequence[int] = (9, 1, 14),
    anchors: Sequence[Sequence[int]] = ((0, 4, 9), (), (2, 3, 14, 9)),
    block_size: int | None = None,
    seed: int = 1,
) -> BlockBatch:
    """Return random features and anchor tokens for sequences of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    positions = [position for group in anchors for position in group]
    width = len(config.target_layer_ids) * config.hidden_size
    return BlockBatch(
        features=torch.randn(starts[-1], width, generator=generator),
        sequence_starts=starts,
        anchor_ids=torch.randint(config.vocab_size, (len(positions),), generator=generator),
        anchor_positions=torch.tensor(positions),
        anchor_counts=[len(group) for group in anchors],
        block_size=block_size or config.block_size,
    )


def build_dense_mask(batch: BlockBatch, num_slots: int) -> Tensor:
    """Return who sees what, [A s, T + A s], written out row by row."""
    num_context, num_anchors = len(batch.features), len(batch.anchor_ids)
    mask = torch.zeros(num_anchors * num_slots, num_context + num_anchors * num_slots).bool()
    anchor = 0
    for start, count in zip(batch.sequence_starts[:-1], batch.anchor_counts, strict=True):
        for _ in range(count):
            rows = slice(anchor * num_slots, (anchor + 1) * num_slots)
            mask[rows, start : start + int(batch.anchor_positions[anchor])] = True
            mask[rows, num_context + rows.start : num_context + rows.stop] = True
            anchor += 1
    return mask


def run_naively(network: DSparkNetwork, batch: BlockBatch) -> Tensor:
    """Return what the forward should, over one mask and all rows at once."""
    config = network.config
    num_slots = config.count_slots(batch.block_size)
    mask = build_dense_mask(batch, num_slots)
    ends = pairwise(batch.sequence_starts)
    positions = [torch.arange(end - start) for start, end in ends]
    positions += [int(a) + torch.arange(num_slots) for a in batch.anchor_positions]
    context = _norm(batch.features @ network.fc.weight.T, network.hidden_norm.weight, config)
    rows = [[int(token)] + [config.mask_token_id] * (num_slots - 1) for token in batch.anchor_ids]
    x = network.embed_tokens.weight[torch.tensor(rows).flatten()]
    is_gemma = config.flavour == "gemma4"
    if is_gemma:
        x = x * math.sqrt(config.hidden_size)
    for layer in network.layers:
        update = _attend(layer, x, context, torch.cat(positions), mask, config)
        norms = dict(layer.named_parameters())
        if is_gemma:
            update = _norm(update, norms["post_attention_layernorm.weight"], config)
        x = x + update
        before = "pre_feedforward" if is_gemma else "post_attention"
        y = _norm(x, norms[f"{before}_layernorm.weight"], config)
        gate = y @ layer.mlp.gate_proj.weight.T
        gate = F.gelu(gate, approximate="tanh") if is_gemma else F.silu(gate)
        update = (gate * (y @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
        if is_gemma:
            update = _norm(update, norms["post_feedforward_layernorm.weight"], config)
        x = x + update
        x = x * layer.layer_scalar if is_gemma else x
    hidden = _norm(x, network.norm.weight, config).view(-1, num_slots, config.hidden_size)
    return hidden if config.sample_from_anchor else hidden[:, 1:]


def _attend(
    layer: torch.nn.Module,
    x: Tensor,
    context: Tensor,
    positions: Tensor,
    mask: Tensor,
    config: DSparkConfig,
) -> Tensor:
    weights = layer.self_attn
    y = _norm(x, layer.input_layernorm.weight, config)
    both = torch.cat([context, y])
    q = (y @ weights.q_proj.weight.T).view(len(y), -1, config.head_dim)
    k = (both @ weights.k_proj.weight.T).view(len(both), -1, config.head_dim)
    if config.flavour == "gemma4":
        v, scale = _norm(k, torch.ones(config.head_dim), config), 1.0
    else:
        v = (both @ weights.v_proj.weight.T).view(len(both), -1, config.head_dim)
        scale = config.head_dim**-0.5
    q = _rotate(_norm(q, weights.q_norm.weight, config), positions[-len(y) :], config)
    k = _rotate(_norm(k, weights.k_norm.weight, config), positions, config)
    repeats = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale)
    return mixed[0].transpose(0, 1).flatten(1) @ weights.o_proj.weight.T


def _norm(x: Tensor, weight: Tensor, config: DSparkConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def _rotate(heads: Tensor, positions: Tensor, config: DSparkConfig) -> Tensor:
    half = config.head_dim // 2
    steps = config.rope_theta ** (-torch.arange(half) / half)
    steps = steps / torch.tensor(config.rope_freq_factors or [1.0] * half)
    angles = (positions[:, None] * steps).repeat(1, 2)[:, None]
    turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    return heads * angles.cos() + turned * angles.sin()


def write_drafter(folder: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a drafter's folder as it is given."""
    (folder / "config.json").write_text(json.dumps(values))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def make_tensors(config: DSparkConfig, *, leave_out: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the random parameters of a drafter by their names in a checkpoint."""
    named = make_network(config, seed=5).named_parameters()
    return {name: p.detach() for name, p in named if name not in leave_out}


def make_gemma4_config(**changes: object) -> DSparkConfig:
    """Return a drafter with the layers of Gemma 4, of whose heads a quarter turns."""
    factors = (1.0, math.inf, math.inf, math.inf)
    fields: dict[str, object] = {"flavour": "gemma4", "num_kv_heads": 1, "logit_softcap": 2.0}
    return make_config(**(fields | {"rope_freq_factors": factors} | changes))


def qwen3_values(config: DSparkConfig) -> dict[str, Any]:
    """Return the config.json of a Qwen3 model with the drafter's layers."""
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "layer_types": ["full_attention"] * config.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def head_values(config: DSparkConfig) -> dict[str, Any]:
    """Return what all dialects say of the heads."""
    return {
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }


def deepspec_values(config: DSparkConfig) -> dict[str, Any]:
    return {
        **qwen3_values(config),
        **head_values(config),
        "architectures": ["Qwen3DSparkModel"],
        "num_target_layers": 6,
        "block_size": config.block_size,
        "num_anchors": 512,
        "target_layer_ids": list(config.target_layer_ids),
    }


def specforge_values(config: DSparkConfig) -> dict[str, Any]:
    nested = {
        **head_values(config),
        "projector_type": "dspark",
        "target_layer_ids": list(config.target_layer_ids),
        "confidence_head_alpha": 1.0,
    }
    return {
        **qwen3_values(config),
        "architectures": ["DSparkDraftModel"],
        "block_size": config.block_size,
        "dflash_config": nested,
    }


def speculators_values(config: DSparkConfig) -> dict[str, Any]:
    return {
        **head_values(config),
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": qwen3_values(config),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.num_slots,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "speculators_config": {"verifier": {"name_or_path": "org/Target-1B"}},
    }
