"""Which answers are trained on, in what order, and what a damaged folder gets."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.training.answers.dataset import Dataset, is_held_out
from forerun.training.answers.shards import find_shards, write_manifest
from training_data import load_head, make_sequence, make_target, write_data


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def data(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"), target)


def open_data(
    folder: Path, *, heldout_frac: float = 0.25, shards: int = 2, seed: int = 1
) -> Dataset:
    return Dataset(folder, heldout_frac=heldout_frac, shuffle_shards=shards, seed=seed)


def draw_ids(dataset: Dataset, position: int, count: int) -> list[str]:
    return [sequence.prompt_id for sequence in dataset.draw(position, count)]


def test_held_out_prompts_are_never_drawn(data: Path) -> None:
    dataset = open_data(data)
    held = {dataset.read(place).prompt_id for place in dataset.heldout}
    assert held == {f"prompt-{n}" for n in range(48) if is_held_out(f"prompt-{n}", 0.25)}
    assert 4 < len(held) < 24
    drawn = draw_ids(dataset, 0, 3 * dataset.num_training)
    assert held.isdisjoint(drawn)
    assert len(set(drawn)) == 48 - len(held)


def test_held_out_tokens_do_not_count(data: Path) -> None:
    everything, some = open_data(data, heldout_frac=0.0), open_data(data)
    held = [some.read(place) for place in some.heldout]
    missing = sum(len(s.token_ids) - s.prompt_len for s in held)
    assert int(everything.count_tokens().sum() - some.count_tokens().sum()) == missing


def test_every_epoch_has_every_answer_once_in_another_order(data: Path) -> None:
    dataset = open_data(data)
    size = dataset.num_training
    first, second = draw_ids(dataset, 0, size), draw_ids(dataset, size, size)
    assert set(Counter(first).values()) == {1}
    assert sorted(first) == sorted(second)
    assert first != second


def test_the_order_follows_from_the_seed_wherever_one_starts(data: Path) -> None:
    order = draw_ids(open_data(data), 0, 60)
    assert draw_ids(open_data(data), 17, 43) == order[17:]
    assert draw_ids(open_data(data, seed=2), 0, 60) != order


def test_shards_are_mixed_a_few_at_a_time(data: Path) -> None:
    dataset = open_data(data, heldout_frac=0.0, shards=1)
    shards = [int(prompt_id.split("-")[1]) // 16 for prompt_id in draw_ids(dataset, 0, 48)]
    assert shards == [shard for shard in dict.fromkeys(shards) for _ in range(16)]
    mixed = open_data(data, heldout_frac=0.0, shards=3)
    shards = [int(prompt_id.split("-")[1]) // 16 for prompt_id in draw_ids(mixed, 0, 16)]
    assert len(set(shards)) == 3


def test_answers_without_a_block_are_left_out(target: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path, target, num_sequences=1)
    from forerun.training.answers.shards import name_shard, write_shard

    head = load_head(target)
    short = make_sequence(head, 1)
    short.prompt_len = len(short.token_ids) - 1
    short.hidden, short.target_lse = short.hidden[-1:], short.target_lse[-1:]
    write_shard(name_shard(data, 1), [short, make_sequence(head, 2)])
    assert open_data(data, heldout_frac=0.0).num_training == 2


def test_a_folder_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no training data"):
        open_data(tmp_path)


def test_a_folder_without_answers_is_refused(data: Path, tmp_path: Path) -> None:
    write_manifest(tmp_path, open_data(data).manifest)
    with pytest.raises(ConfigError, match=r"no answer to train on \(0 shards"):
        open_data(tmp_path)


def test_a_truncated_shard_is_refused_by_name(target: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path, target, num_sequences=32)
    broken = find_shards(data)[1]
    broken.write_bytes(broken.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="shard-00001.*not a complete shard"):
        open_data(data)


def test_the_normaliser_makes_stored_probabilities_sum_to_one(target: Path) -> None:
    head, sequence = load_head(target).float(), make_sequence(load_head(target), 4)
    probs = torch.exp(sequence.hidden.float() @ head.T - sequence.target_lse[:, None])
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)), atol=2e-3, rtol=0)
    answer = sequence.token_ids[sequence.prompt_len :]
    assert torch.equal(probs.argmax(-1), answer)
