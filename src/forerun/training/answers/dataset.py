"""The sequences of a data folder: which are trained on, which are held out, and in what order.

A prompt is held out by the hash of its id, so that all its answers are, whatever else the folder
holds. The order of an epoch follows from the seed: shards are shuffled, then the answers of a few
shards at a time, so that the pages of a few shards serve many reads.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.training.answers.shards import (
    Manifest,
    Shard,
    TargetSequence,
    find_shards,
    read_manifest,
)

_MIN_ANSWER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a sequence lies."""

    shard: int
    index: int


class Dataset:
    """All shards of a folder, opened and checked. Raises ConfigError."""

    def __init__(
        self, folder: Path, *, heldout_frac: float, shuffle_shards: int, seed: int
    ) -> None:
        self.manifest: Manifest = read_manifest(folder)
        self._shards = [Shard(path) for path in find_shards(folder)]
        self._shuffle_shards = shuffle_shards
        self._seed = seed
        self._training: list[list[_Place]] = []
        self.heldout: list[_Place] = []
        for number, shard in enumerate(self._shards):
            places = [_Place(number, i) for i in range(len(shard)) if _has_block(shard, i)]
            ids = [shard.prompt_ids[place.index] for place in places]
            held = [is_held_out(prompt_id, heldout_frac) for prompt_id in ids]
            pairs = list(zip(places, held, strict=True))
            self._training.append([place for place, is_held in pairs if not is_held])
            self.heldout += [place for place, is_held in pairs if is_held]
        self.num_training = sum(map(len, self._training))
        self._epoch: tuple[int, list[_Place]] | None = None
        if not self.num_training:
            raise ConfigError(
                f"{folder} holds no answer to train on ({len(self._shards)} shards, "
                f"{len(self.heldout)} answers held out); make some with `forerun train generate`."
            )

    def read(self, place: _Place) -> TargetSequence:
        """Return one sequence."""
        return self._shards[place.shard].read(place.index)

    def draw(self, position: int, count: int) -> list[TargetSequence]:
        """Return the sequences number `position` and on of the endless shuffled order."""
        return [self.read(self._locate(position + i)) for i in range(count)]

    def count_tokens(self) -> Tensor:
        """Return how often every token id [V] occurs in the answers trained on."""
        counts = torch.zeros(self.manifest.vocab_size, dtype=torch.int64)
        for places in self._training:
            for place in places:
                answer = self._shards[place.shard].read_answer(place.index)
                counts += torch.bincount(answer, minlength=len(counts))
        return counts

    def _locate(self, position: int) -> _Place:
        epoch, index = divmod(position, self.num_training)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._shuffle(epoch)
        return self._epoch[1][index]

    def _shuffle(self, epoch: int) -> list[_Place]:
        chooser = random.Random(f"{self._seed}:{epoch}")
        shards = list(self._training)
        chooser.shuffle(shards)
        order: list[_Place] = []
        for first in range(0, len(shards), self._shuffle_shards):
            group = [
                place for shard in shards[first : first + self._shuffle_shards] for place in shard
            ]
            chooser.shuffle(group)
            order += group
        return order


def is_held_out(prompt_id: str, frac: float) -> bool:
    """Return whether a prompt is kept for evaluation."""
    digest = hashlib.sha256(prompt_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") < frac * 2**64


def _has_block(shard: Shard, index: int) -> bool:
    length: int = shard.sequence_starts[index + 1] - shard.sequence_starts[index]
    prompt_len: int = shard.prompt_lens[index]
    return length - prompt_len >= _MIN_ANSWER_TOKENS
