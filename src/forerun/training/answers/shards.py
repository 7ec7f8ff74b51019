"""The training data on disk: a manifest, and shards of sequences with what the target computed.

A shard is one safetensors file, written whole and renamed into place, so that every shard found is
complete. Sequences lie one after the other, and reading one maps only its own pages.
Shapes: S sequences, L tokens of one (prompt, then answer), A answer tokens, n taps, d hidden_size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import ConfigError

VERSION = 1
MANIFEST = "dataset.json"
_open: Any = safe_open
# What a sequence stores beside its tokens is bfloat16.
_FLOAT_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What all shards of a folder have in common; data of two targets never mix."""

    model: str
    quantization: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    version: int = VERSION

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes at most: taps, last hidden state and the token itself."""
        return _FLOAT_BYTES * self.hidden_size * (len(self.target_layer_ids) + 1) + 8


@dataclass(slots=True, kw_only=True)
class TargetSequence:
    """One answer of the target and what it computed on the way."""

    prompt_id: str
    temperature: float
    token_ids: Tensor  # [L] int64
    prompt_len: int
    features: Tensor  # [L - 1, n * d] bfloat16, positions 0 .. L - 2
    hidden: Tensor  # [A, d] bfloat16, row i predicts answer token i
    target_lse: Tensor  # [A] float32, logsumexp of the full-vocabulary logits of `hidden`


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps(asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder; raises ConfigError."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text())
        values["target_layer_ids"] = tuple(values["target_layer_ids"])
        manifest = Manifest(**values)
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no training data ({MANIFEST} cannot be read); make some with "
            "`forerun train generate`."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a manifest of training data: {error}.") from error
    if manifest.version != VERSION:
        raise ConfigError(f"{path} has version {manifest.version}; this Forerun reads {VERSION}.")
    return manifest


def find_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder in the order they were written."""
    return sorted(folder.glob("shard-*.safetensors"))


def name_shard(folder: Path, number: int) -> Path:
    """Return the path of a shard."""
    return folder / f"shard-{number:05d}.safetensors"


def write_shard(path: Path, sequences: Sequence[TargetSequence]) -> None:
    """Write some sequences as one file; it appears when it is complete."""
    lengths = [len(sequence.token_ids) for sequence in sequences]
    answers = [len(sequence.hidden) for sequence in sequences]
    tensors = {
        "token_ids": torch.cat([s.token_ids for s in sequences]).int(),
        "sequence_starts": _accumulate(lengths),
        "prompt_lens": torch.tensor([s.prompt_len for s in sequences], dtype=torch.int32),
        "features": torch.cat([s.features for s in sequences]),
        "feature_starts": _accumulate([length - 1 for length in lengths]),
        "hidden": torch.cat([s.hidden for s in sequences]),
        "hidden_starts": _accumulate(answers),
        "target_lse": torch.cat([s.target_lse for s in sequences]),
    }
    metadata = {
        "ids": json.dumps([s.prompt_id for s in sequences]),
        "temperatures": json.dumps([s.temperature for s in sequences]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata)
    partial.replace(path)


class Shard:
    """One open shard. Raises ConfigError where the file is not a complete one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: Any = _open(path, "pt")
            metadata = self._file.metadata() or {}
            self.prompt_ids: list[str] = json.loads(metadata["ids"])
            self.temperatures: list[float] = json.loads(metadata["temperatures"])
            names = ("sequence_starts", "feature_starts", "hidden_starts", "prompt_lens")
            starts = [self._file.get_tensor(name).tolist() for name in names]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a complete shard of training data ({error}); delete it and run "
                "`forerun train generate` again."
            ) from error
        self.sequence_starts, self._feature_starts, self._hidden_starts, self.prompt_lens = starts

    def __len__(self) -> int:
        return len(self.prompt_ids)

    def read(self, index: int) -> TargetSequence:
        """Return one sequence; its tensors are copies."""
        return TargetSequence(
            prompt_id=self.prompt_ids[index],
            temperature=self.temperatures[index],
            token_ids=self._read("token_ids", self.sequence_starts, index).long(),
            prompt_len=self.prompt_lens[index],
            features=self._read("features", self._feature_starts, index),
            hidden=self._read("hidden", self._hidden_starts, index),
            target_lse=self._read("target_lse", self._hidden_starts, index),
        )

    def read_answer(self, index: int) -> Tensor:
        """Return only the answer's token ids [A]."""
        token_ids = self._read("token_ids", self.sequence_starts, index).long()
        return token_ids[self.prompt_lens[index] :]

    def _read(self, name: str, starts: Sequence[int], index: int) -> Tensor:
        rows: Tensor = self._file.get_slice(name)[starts[index] : starts[index + 1]]
        return rows


def _accumulate(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
