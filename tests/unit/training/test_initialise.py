"""The draft vocabulary, the mask token, and layers copied from the target."""

from __future__ import annotations

import pytest
import torch

from forerun.errors import ConfigError
from forerun.training.answers.dataset import Dataset
from forerun.training.initialise import (
    Target,
    build_network,
    choose_draft_vocabulary,
    choose_mask_token,
)
from training_data import TOKENS, make_settings, make_target, write_data

COUNTS = torch.tensor([0, 5, 0, 9, 1, 5, 0, 2])


def test_the_most_frequent_tokens_and_the_required_ones_are_drafted() -> None:
    assert choose_draft_vocabulary(COUNTS, [6], 4).tolist() == [1, 3, 5, 6]
    # Among equals the lower id, required ones first.
    assert choose_draft_vocabulary(COUNTS, [0], 3).tolist() == [0, 1, 3]


def test_the_mask_is_a_token_that_no_answer_contains() -> None:
    assert choose_mask_token(COUNTS, [0]) == 2
    assert choose_mask_token(COUNTS + 1, []) == 0


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Dataset]:
    folder = tmp_path_factory.mktemp("parts")
    path = make_target(folder / "target")
    data = write_data(folder / "data", path)
    dataset = Dataset(data, heldout_frac=0.0, shuffle_shards=1, seed=0)
    return Target(path, dataset), dataset


def test_a_network_drafts_what_the_answers_contain(parts: tuple[Target, Dataset]) -> None:
    target, dataset = parts
    network = build_network(target, dataset, make_settings(draft_vocab_size=30))
    chosen = set(network.d2t.tolist())
    assert len(chosen) == 30
    assert chosen >= {*TOKENS, *target.spec.eos_token_ids}
    assert torch.equal(network.lm_head.weight, target.head[network.d2t])
    assert torch.equal(network.embed_tokens.weight, target.embed)
    assert network.config.mask_token_id not in TOKENS
    again = build_network(target, dataset, make_settings(draft_vocab_size=30))
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_layers_can_start_as_the_targets_last(parts: tuple[Target, Dataset]) -> None:
    target, dataset = parts
    settings = make_settings(num_layers=2, init="target")
    network = build_network(target, dataset, settings)
    slots = target.model.slots()
    for own, theirs in ((0, 2), (1, 3)):
        layer = network.layers[own]
        q = slots[f"layers.{theirs}.q.weight"].destination.float()
        assert torch.equal(layer.self_attn.q_proj.weight, q)
        down = slots[f"layers.{theirs}.down.weight"].destination.float()
        assert torch.equal(layer.mlp.down_proj.weight, down)
    features = dataset.draw(0, 1)[0].features.float()
    deepest = features[:, -network.config.hidden_size :]
    context = network.project_context(features)
    norm = slots["layers.2.input_norm.weight"].destination
    expected = torch.nn.functional.rms_norm(deepest, deepest.shape[-1:], norm, eps=1e-6)
    torch.testing.assert_close(context, expected, atol=1e-3, rtol=1e-3)
    attention = network.layers[0].self_attn
    keys = attention.k_proj(context).unflatten(-1, (-1, network.config.head_dim))
    sizes = keys.square().mean(-1).sqrt()
    torch.testing.assert_close(attention.k_norm(keys).square().mean(-1).sqrt().mean(), sizes.mean())


def test_a_target_of_too_few_layers_cannot_be_copied(parts: tuple[Target, Dataset]) -> None:
    target, dataset = parts
    with pytest.raises(ConfigError, match="at least 5 layers.*--init random"):
        build_network(target, dataset, make_settings(num_layers=5, init="target"))
