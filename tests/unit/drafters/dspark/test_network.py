"""The backbone: equal to a naive dense-mask twin, its mask, its layouts, its precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dspark_networks import make_batch, make_config, make_gemma4_config, make_network, run_naively
from forerun.drafters.dspark.network import BlockBatch, DSparkNetwork

CONFIGS = {
    "anchor": make_config(),
    "legacy": make_config(sample_from_anchor=False),
    "one_kv_head_each": make_config(num_kv_heads=4),
    "wide_heads": make_config(head_dim=16),
    "gemma4": make_gemma4_config(),
}


def _gradients(network: DSparkNetwork, hidden: Tensor) -> dict[str, Tensor]:
    weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
    weights = {name: p for name, p in weights.items() if "_head" not in name}
    direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))
    grads = torch.autograd.grad((hidden * direction).sum(), list(weights.values()))
    return dict(zip(weights, grads, strict=True))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [5, 3, 1])
def test_forward_and_gradients_equal_the_dense_mask_twin(name: str, block_size: int) -> None:
    config = CONFIGS[name]
    network, batch = make_network(config), make_batch(config, block_size=block_size)
    hidden, expected = network(batch), run_naively(network, batch)
    assert hidden.shape == (7, block_size, config.hidden_size)
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-4)
    wanted = _gradients(network, expected)
    for weight, gradient in _gradients(network, hidden).items():
        torch.testing.assert_close(gradient, wanted[weight], atol=1e-4, rtol=1e-3, msg=weight)
    assert wanted["fc.weight"].abs().max() > 1e-3, "context keys and values carry no gradient"


def _logits(network: DSparkNetwork, batch: BlockBatch) -> Tensor:
    with torch.no_grad():
        return network.compute_base_logits(network(batch))


def test_a_block_sees_its_context_before_the_anchor_and_nothing_else() -> None:
    config = make_config()
    network, batch = make_network(config), make_batch(config)
    logits = _logits(network, batch)
    block, anchor, start = 3, 2, batch.sequence_starts[2]  # position 2 of the third sequence
    for row in range(len(batch.features)):
        features = batch.features.clone()
        features[row] += 1.0
        moved = (_logits(network, replace(batch, features=features)) - logits)[block].abs().max()
        is_visible = start <= row < start + anchor
        assert (moved > 1e-3) if is_visible else (moved == 0), row


def test_a_block_does_not_see_other_anchors() -> None:
    config = make_config()
    network, batch = make_network(config), make_batch(config)
    logits = _logits(network, batch)
    ids = (batch.anchor_ids + 1) % config.vocab_size
    positions = batch.anchor_positions.clone()
    ids[3] = batch.anchor_ids[3]
    positions[[0, 4, 5]] = torch.tensor([3, 11, 0])
    changed = _logits(network, replace(batch, anchor_ids=ids, anchor_positions=positions))
    torch.testing.assert_close(changed[3], logits[3], atol=1e-6, rtol=0)
    assert (changed - logits).abs().amax((1, 2))[[0, 1, 2, 4, 5, 6]].min() > 1e-2


def test_every_slot_of_a_block_sees_the_whole_block() -> None:
    config = make_config()
    network = make_network(config)
    lone = make_batch(config, lengths=(4,), anchors=((2,),))
    long, short = _logits(network, lone), _logits(network, replace(lone, block_size=4))
    assert (long[:, :4] - short).abs().amax(-1).min() > 1e-3


def test_slots_of_both_layouts_sit_at_the_anchor_and_after() -> None:
    """A legacy block of g drafts is the other layout's block of g + 1 without its first row."""
    config = make_config(sample_from_anchor=False)
    legacy = make_network(config)
    other = DSparkNetwork(make_config(block_size=6))
    other.load_state_dict(legacy.state_dict())
    batch = make_batch(config)
    torch.testing.assert_close(legacy(batch), other(replace(batch, block_size=6))[:, 1:])


def test_positions_count_from_the_start_of_the_own_sequence() -> None:
    config = make_config()
    network = make_network(config)
    both = make_batch(config, lengths=(6, 6), anchors=((4,), (4,)))
    both.features[6:] = both.features[:6]
    both.anchor_ids[1] = both.anchor_ids[0]
    hidden = network(both)
    torch.testing.assert_close(hidden[1], hidden[0])


def test_autocast_computes_in_bfloat16_and_keeps_the_gradients_in_float32() -> None:
    config = make_config()
    network, batch = make_network(config), make_batch(config)
    exact = network(batch)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = network(batch)
        logits = network.compute_base_logits(hidden)
    assert (hidden.dtype, logits.dtype) == (torch.bfloat16, torch.float32)
    assert (hidden.float() - exact).abs().max() < 0.1
    wanted = _gradients(network, exact)
    for weight, gradient in _gradients(network, hidden.float()).items():
        assert gradient.dtype == torch.float32
        error = (gradient - wanted[weight]).norm() / wanted[weight].norm()
        assert error < 0.05, (weight, float(error))


def test_a_bfloat16_network_takes_features_of_any_type() -> None:
    config = make_config()
    network, batch = make_network(config), make_batch(config)
    exact = network(batch)
    hidden = network.bfloat16()(batch)
    assert hidden.dtype == torch.bfloat16
    assert (hidden.float() - exact).abs().max() < 0.15


def test_capped_logits_stay_below_the_cap() -> None:
    network = make_network(make_gemma4_config(logit_softcap=2.0))
    hidden = 5 * torch.randn(3, network.config.hidden_size)
    expected = 2.0 * torch.tanh(hidden @ network.lm_head.weight.T / 2.0)
    logits = network.compute_base_logits(hidden)
    torch.testing.assert_close(logits, expected)
    assert logits.abs().max() <= 2.0


def test_sharing_takes_the_targets_tables_and_the_draft_vocabularys_head_rows() -> None:
    config = make_config(draft_vocab_size=20)
    network = make_network(config)
    embed, head = torch.randn(2, config.vocab_size, config.hidden_size)
    network.share_target(embed, head)
    assert network.embed_tokens.weight.data_ptr() == embed.data_ptr(), "copied"
    hidden = torch.randn(3, config.hidden_size)
    expected = (hidden @ head.T)[:, network.d2t]
    torch.testing.assert_close(network.compute_base_logits(hidden), expected)
    frozen = {name for name, p in network.named_parameters() if not p.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
