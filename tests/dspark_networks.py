"""Small block drafters with lively random weights, batches for them, and a naive twin."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.network import BlockBatch, DSparkNetwork


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
    for layer in network.layers:
        x = x + _attend(layer, x, context, torch.cat(positions), mask, config)
        y = _norm(x, layer.post_attention_layernorm.weight, config)
        gated = F.silu(y @ layer.mlp.gate_proj.weight.T) * (y @ layer.mlp.up_proj.weight.T)
        x = x + gated @ layer.mlp.down_proj.weight.T
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
    v = (both @ weights.v_proj.weight.T).view(len(both), -1, config.head_dim)
    q = _rotate(_norm(q, weights.q_norm.weight, config), positions[-len(y) :], config)
    k = _rotate(_norm(k, weights.k_norm.weight, config), positions, config)
    repeats = config.num_heads // config.num_kv_heads
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
    mixed = F.scaled_dot_product_attention(*heads, attn_mask=mask)
    return mixed[0].transpose(0, 1).flatten(1) @ weights.o_proj.weight.T


def _norm(x: Tensor, weight: Tensor, config: DSparkConfig) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def _rotate(heads: Tensor, positions: Tensor, config: DSparkConfig) -> Tensor:
    half = config.head_dim // 2
    steps = config.rope_theta ** (-torch.arange(half) / half)
    angles = (positions[:, None] * steps).repeat(1, 2)[:, None]
    turned = torch.cat([-heads[..., half:], heads[..., :half]], -1)
    return heads * angles.cos() + turned * angles.sin()
