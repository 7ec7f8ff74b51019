"""The tensors of a GGUF file, by local weight names.

Quantised ones are handed out as they are stored; where that is not wanted they are dequantised,
large ones in chunks of rows. Pages of the mapped file are given back as soon as they were read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import torch

from forerun.gguf_file import GGUFFile, GGUFTensor
from forerun.models.decoder import DecoderModel
from forerun.models.gguf import ROPE_FREQS, gguf_name
from forerun.models.layer import WeightSlot
from forerun.models.spec import ModelSpec
from forerun.models.stored import fill
from forerun.quantisation.formats import BlockFormat, BlockTensor
from forerun.quantisation.quantise import quantise

_CHUNK_NUMBERS = 2**22
_MAX_THREADS = 8


class GGUFTensors:
    """StoredTensors of a file."""

    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)

    def __init__(self, file: GGUFFile, family: type[DecoderModel], spec: ModelSpec) -> None:
        self.path = file.path
        self._file = file
        self._interleaves_heads = family.gguf_permutes_heads
        self._head_dim = spec.head_dim

    def stored_name(self, name: str) -> str:
        """Return llama.cpp's name of a weight."""
        return gguf_name(name)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return all shapes but that of the rotary factors, which the spec has read."""
        tensors = self._file.tensors.items()
        return {name: tensor.shape for name, tensor in tensors if name != ROPE_FREQS}

    def find_type(self, name: str) -> str:
        """Return ggml's name of the type."""
        return self._find(name).type_name

    def split_fill(self, name: str, slot: WeightSlot) -> list[Callable[[], None]]:
        """Return a job per chunk of rows."""
        tensor = self._find(name)
        if self._is_interleaved(name):
            halves = slot.destination.view(-1, 2, self._head_dim // 2, *slot.shape[1:])
            slot = WeightSlot(halves.transpose(1, 2), slot.shape)
        return [
            functools.partial(self._fill_rows, slot, tensor, start, stop)
            for start, stop in _split_rows(tensor, slot)
        ]

    def read_blocks(self, name: str, kind: BlockFormat) -> BlockTensor:
        """Return a weight in blocks: a view of the file where nothing has to change."""
        tensor = self._find(name)
        if tensor.type_name == kind.name:
            blocks = self._file.read_raw(tensor, 0, tensor.num_rows)
        else:
            blocks = self._quantise(tensor)
        if self._is_interleaved(name):
            blocks = _separate_halves(blocks, self._head_dim)
        return BlockTensor(blocks, kind)

    def release(self, name: str) -> None:
        """Give the file's pages back."""
        tensor = self._find(name)
        self._file.release_rows(tensor, 0, tensor.num_rows)

    def _find(self, name: str) -> GGUFTensor:
        return self._file.tensors[gguf_name(name)]

    def _is_interleaved(self, name: str) -> bool:
        """Whether the two rotary halves of a head's rows alternate in the file."""
        return self._interleaves_heads and name.split(".")[-2] in ("q", "k")

    def _fill_rows(self, slot: WeightSlot, tensor: GGUFTensor, start: int, stop: int) -> None:
        values = torch.from_numpy(self._file.read_rows(tensor, start, stop))
        if stop - start == tensor.num_rows:
            fill(slot, values.reshape(slot.shape))
        else:
            slot.destination[start:stop] = values
        self._file.release_rows(tensor, start, stop)

    def _quantise(self, tensor: GGUFTensor) -> np.ndarray:
        """Return a float tensor in Q8_0."""
        chunks = []
        for start, stop in _split_chunks(tensor):
            rows = torch.from_numpy(self._file.read_rows(tensor, start, stop))
            chunks.append(quantise(rows, tensor.name))
            self._file.release_rows(tensor, start, stop)
        return np.concatenate(chunks)


def _split_rows(tensor: GGUFTensor, slot: WeightSlot) -> list[tuple[int, int]]:
    """Return the chunks of a tensor, one if its slot is not a plain run of rows."""
    is_plain = tuple(slot.destination.shape) == slot.shape
    return _split_chunks(tensor) if is_plain else [(0, tensor.num_rows)]


def _split_chunks(tensor: GGUFTensor) -> list[tuple[int, int]]:
    step = max(1, _CHUNK_NUMBERS // tensor.shape[-1])
    rows = tensor.num_rows
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _separate_halves(blocks: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows [N, row_bytes] with the rotary halves of each head one after the other."""
    heads = blocks.reshape(-1, head_dim // 2, 2, blocks.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(blocks.shape)
