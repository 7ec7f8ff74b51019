"""The heads: stepping equals teacher forcing, and each kind's formula written out once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dspark_networks import make_config, make_network
from forerun.drafters.dspark.heads import MarkovHead

NUM_BLOCKS, BLOCK_SIZE = 3, 5


def _make(kind: str) -> tuple[MarkovHead, Tensor, Tensor]:
    config = make_config(markov_head_type=kind, draft_vocab_size=19)
    head = make_network(config).markov_head
    assert head is not None
    previous_ids = torch.randint(config.vocab_size, (NUM_BLOCKS, BLOCK_SIZE))
    return head, previous_ids, torch.randn(NUM_BLOCKS, BLOCK_SIZE, config.hidden_size)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_step_by_step_equals_the_whole_block(kind: str) -> None:
    head, previous_ids, hidden = _make(kind)
    block = head.bias_block(previous_ids, hidden)
    assert block.shape == (NUM_BLOCKS, BLOCK_SIZE, 19)
    state = head.start(NUM_BLOCKS)
    for slot in range(BLOCK_SIZE):
        bias, state = head.step(previous_ids[:, slot], hidden[:, slot], state)
        torch.testing.assert_close(bias, block[:, slot], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_biases_follow_the_formula(kind: str) -> None:
    head, previous_ids, hidden = _make(kind)
    expected = []
    for block in range(NUM_BLOCKS):
        state = torch.zeros(head.rank)
        for slot in range(BLOCK_SIZE):
            e, h = head.markov_w1.weight[previous_ids[block, slot]], hidden[block, slot]
            mixed, state = _mix_by_hand(kind, head, e, h, state)
            expected.append(head.markov_w2.weight @ mixed)
    wanted = torch.stack(expected).view(NUM_BLOCKS, BLOCK_SIZE, -1)
    torch.testing.assert_close(head.bias_block(previous_ids, hidden), wanted, atol=1e-5, rtol=1e-4)


def _mix_by_hand(
    kind: str, head: MarkovHead, e: Tensor, h: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    if kind == "vanilla":
        return e, s
    if kind == "gated":
        return torch.sigmoid(head.gate_proj(torch.cat([h, e]))) * e, s
    u = head.joint_proj(torch.cat([s, e, h])).view(3, -1)
    gate = torch.sigmoid(u[0])
    return torch.tanh(u[2]), gate * s + (1 - gate) * torch.tanh(u[1])


@pytest.mark.parametrize("reads_markov", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_confidence_is_linear_in_what_it_is_told_to_read(
    reads_markov: bool, has_bias: bool
) -> None:
    config = make_config(confidence_with_markov=reads_markov, confidence_bias=has_bias)
    network = make_network(config)
    assert network.confidence_head is not None
    assert network.markov_head is not None
    hidden = torch.randn(NUM_BLOCKS, BLOCK_SIZE, config.hidden_size)
    embedding = network.markov_head.embed(torch.randint(61, (NUM_BLOCKS, BLOCK_SIZE)))
    weight = network.confidence_head.proj.weight[0]
    expected = hidden @ weight[: config.hidden_size]
    if reads_markov:
        expected = expected + embedding @ weight[config.hidden_size :]
    if has_bias:
        expected = expected + network.confidence_head.proj.bias
    logits = network.confidence_head(hidden, embedding)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


def test_a_drafter_without_heads_is_a_dflash_drafter() -> None:
    network = make_network(make_config(markov_rank=0, has_confidence_head=False))
    assert network.config.method == "dflash"
    assert network.markov_head is None
    assert network.confidence_head is None
    assert make_config(markov_rank=0, confidence_with_markov=False).method == "dspark"
    assert make_config(has_confidence_head=False).method == "dspark"
