"""Training data on disk: what is written is read, and damage is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.training.answers.shards import (
    Manifest,
    Shard,
    TargetSequence,
    find_shards,
    name_shard,
    read_manifest,
    write_manifest,
    write_shard,
)

MANIFEST = Manifest(
    model="tiny", quantization="exact", target_layer_ids=(0, 2), hidden_size=4, vocab_size=50
)


def make_sequence(name: str, prompt_len: int, answer_len: int, seed: int = 0) -> TargetSequence:
    generator = torch.Generator().manual_seed(seed)
    length = prompt_len + answer_len
    return TargetSequence(
        prompt_id=name,
        temperature=0.5,
        token_ids=torch.randint(50, (length,), generator=generator),
        prompt_len=prompt_len,
        features=torch.randn(length - 1, 8, generator=generator).bfloat16(),
        hidden=torch.randn(answer_len, 4, generator=generator).bfloat16(),
        target_lse=torch.randn(answer_len, generator=generator),
    )


def test_sequences_come_back_as_they_were(tmp_path: Path) -> None:
    sequences = [make_sequence("a", 3, 5, 1), make_sequence("b", 7, 1, 2)]
    write_shard(name_shard(tmp_path, 0), sequences)
    shard = Shard(name_shard(tmp_path, 0))
    assert len(shard) == 2
    for index, wanted in enumerate(sequences):
        found = shard.read(index)
        assert (found.prompt_id, found.temperature) == (wanted.prompt_id, wanted.temperature)
        assert found.prompt_len == wanted.prompt_len
        for name in ("token_ids", "features", "hidden", "target_lse"):
            torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=0)
        assert shard.read_answer(index).tolist() == wanted.token_ids[wanted.prompt_len :].tolist()


def test_shards_are_found_in_order_and_unfinished_ones_are_not(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        write_shard(name_shard(tmp_path, number), [make_sequence("a", 3, 5)])
    name_shard(tmp_path, 3).with_suffix(".partial").write_bytes(b"half")
    assert find_shards(tmp_path) == [name_shard(tmp_path, number) for number in range(3)]


def test_a_truncated_shard_is_refused_by_name(tmp_path: Path) -> None:
    path = name_shard(tmp_path, 0)
    write_shard(path, [make_sequence("a", 3, 5)])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match="shard-00000.*not a complete shard"):
        Shard(path)


def test_a_manifest_comes_back_and_its_absence_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="forerun train generate"):
        read_manifest(tmp_path)
    write_manifest(tmp_path / "new", MANIFEST)
    assert read_manifest(tmp_path / "new") == MANIFEST


@pytest.mark.parametrize("text", ["{", '{"model": "x"}', "[]"])
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(ConfigError, match="not a manifest"):
        read_manifest(tmp_path)
