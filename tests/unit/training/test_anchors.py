"""Anchors, labels and the rows of the target they are held against, by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.training.answers.shards import TargetSequence
from forerun.training.objective.anchors import build_blocks, sample_anchors
from forerun.training.objective.batches import TrainBatch, build_batch


def sample(prompt_len: int, length: int, count: int, seed: int = 0) -> list[int]:
    return sample_anchors(prompt_len, length, count, seed).tolist()


def make_sequence(prompt_len: int, length: int, first_token: int) -> TargetSequence:
    """Return a sequence whose every number says where it comes from."""
    answers = torch.arange(length - prompt_len)
    return TargetSequence(
        prompt_id="x",
        temperature=1.0,
        token_ids=first_token + torch.arange(length),
        prompt_len=prompt_len,
        features=torch.arange(length - 1, dtype=torch.bfloat16)[:, None].repeat(1, 2),
        hidden=(prompt_len + answers)[:, None].repeat(1, 3).bfloat16(),
        target_lse=(first_token + prompt_len + answers).float(),
    )


def build(*sequences: TargetSequence, anchors: int, block_size: int) -> TrainBatch:
    return build_batch(
        sequences,
        range(len(sequences)),
        anchors_per_sequence=anchors,
        block_size=block_size,
        device=torch.device("cpu"),
    )


def test_every_answer_token_but_the_last_can_be_an_anchor() -> None:
    assert sample(prompt_len=3, length=8, count=100) == [3, 4, 5, 6]
    assert sample(prompt_len=3, length=5, count=100) == [3]
    assert sample(prompt_len=3, length=4, count=100) == []


def test_anchors_rise_do_not_repeat_and_all_occur() -> None:
    draws = [sample(prompt_len=2, length=12, count=3, seed=seed) for seed in range(60)]
    assert all(draw == sorted(set(draw)) and len(draw) == 3 for draw in draws)
    assert {position for draw in draws for position in draw} == set(range(2, 11))


def test_labels_follow_the_anchor_and_end_with_the_sequence() -> None:
    blocks = build_blocks(torch.arange(10, 16), torch.tensor([1, 4]), block_size=3)
    assert blocks.labels[0].tolist() == [12, 13, 14]
    assert blocks.previous[0].tolist() == [11, 12, 13]
    assert blocks.mask.tolist() == [[True, True, True], [True, False, False]]
    assert blocks.labels[1, 0] == 15
    assert blocks.previous[1, 0] == 14


def test_rows_of_the_target_are_those_that_predict_the_labels() -> None:
    """Hidden row i is marked with the position it predicts, its normaliser with the token."""
    batch = build(
        make_sequence(3, 9, first_token=100),
        make_sequence(2, 7, first_token=200),
        anchors=4,
        block_size=3,
    )
    positions = batch.blocks.anchor_positions[:, None] + torch.arange(3) + 1
    mask = batch.mask
    assert torch.equal(batch.hidden.view(*mask.shape, 3)[..., 0][mask].long(), positions[mask])
    assert torch.equal(batch.log_normaliser.view_as(mask)[mask].long(), batch.labels[mask])
    assert torch.equal(batch.previous[:, 0], batch.blocks.anchor_ids)


def test_context_rows_end_where_no_anchor_can_see() -> None:
    sequences = [make_sequence(3, 9, 100), make_sequence(2, 7, 200)]
    batch = build(*sequences, anchors=2, block_size=3)
    starts, counts = batch.blocks.sequence_starts, batch.blocks.anchor_counts
    assert counts == [2, 2]
    last = batch.blocks.anchor_positions[[1, 3]]
    assert list(starts) == [0, int(last[0]), int(last.sum())]
    rows: Tensor = batch.blocks.features[:, 0]
    assert rows.tolist() == [*range(int(last[0])), *range(int(last[1]))]
