"""GGUF files: the header (metadata and where tensors lie), and tensors as stored or float32.

The header is parsed here, because the gguf package needs ten seconds for a vocabulary of 262,144
tokens; the package does the dequantising. Every defect of a file is a ConfigError naming the file.
No torch.
Shapes are in row-major order, the reverse of what GGUF stores.

Layout (versions 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 pairs; then per pair
a string key, u32 type and the value; then per tensor its name, shape, type and offset.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError
from forerun.quantisation.check import check_scales

MAGIC = b"GGUF"
# Type id -> name, numbers per block, bytes per block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in its file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # bytes from the start of the file

    @property
    def type_name(self) -> str:
        """The type's name, such as Q4_1."""
        return TENSOR_TYPES[self.type_id][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (the last dimension)."""
        _, block, size = TENSOR_TYPES[self.type_id]
        return self.shape[-1] // block * size

    @property
    def num_rows(self) -> int:
        """Rows, all leading dimensions together."""
        return int(np.prod(self.shape[:-1], dtype=np.int64))


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header over a read-only map of the file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def read_raw(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop as stored: a view of the map, bytes [rows, row_bytes].

        Raises ConfigError if a block is scaled by a number that is not finite.
        """
        size = tensor.row_bytes
        offset = tensor.offset + start * size
        raw = np.frombuffer(self.data, np.uint8, (stop - start) * size, offset)
        check_scales(
            raw,
            stored=tensor.type_name,
            block_bytes=TENSOR_TYPES[tensor.type_id][2],
            path=self.path,
            name=tensor.name,
            offset=offset,
        )
        return raw.reshape(stop - start, size)

    def read_rows(self, tensor: GGUFTensor, start: int, stop: int) -> np.ndarray:
        """Dequantise rows start..stop of a tensor; float32 [rows, columns]."""
        from gguf import GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(tensor.type_id)
        values = dequantize(self.read_raw(tensor, start, stop), kind)
        return values if values.flags.writeable else values.copy()

    def release_rows(self, tensor: GGUFTensor, start: int, stop: int) -> None:
        """Give the memory behind rows start..stop back to the system; reading them still works."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is not None:
            first = (tensor.offset + start * tensor.row_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            self.data.madvise(advice, first, tensor.offset + stop * tensor.row_bytes - first)


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file and check that all tensor data is there."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise ConfigError(f"{path} is not a GGUF file (it does not start with 'GGUF').")
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    reader = _HeaderReader(path, data)
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ConfigError(
            f"{path} is GGUF version {version} or big-endian; supported are little-endian versions "
            "2 and 3. Convert it again with a current tool."
        )
    num_tensors, num_fields = reader.scalar("Q"), reader.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("I"))
    if metadata.get("split.count", 1) != 1:
        raise ConfigError(f"{path} is one part of a split model; merge the parts into one file.")
    tensors = reader.tensors(num_tensors, metadata.get("general.alignment", 32))
    return GGUFFile(path, metadata, tensors, data)


class _HeaderReader:
    """A bounds-checked cursor over the header."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset = len(MAGIC)

    def corrupt(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is truncated or corrupt: {what}. Download it again.")

    def take(self, size: int) -> bytes:
        start, self.offset = self.offset, self.offset + size
        if self.offset > len(self.data):
            raise self.corrupt(f"it ends at byte {len(self.data)}, inside its header")
        return self.data[start : self.offset]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, type_id: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self.array(self.scalar("I"), self.scalar("Q"))
        raise self.corrupt(f"its metadata has a value of unknown type {type_id}")

    def array(self, type_id: int, length: int) -> list[Any]:
        if type_id == _STRING:
            return [self.string() for _ in range(length)]
        if type_id not in _SCALARS:
            raise self.corrupt(f"its metadata has an array of unknown type {type_id}")
        kind = np.dtype("<" + _SCALARS[type_id])
        values: list[Any] = np.frombuffer(self.take(length * kind.itemsize), kind).tolist()
        return values

    def tensors(self, count: int, alignment: object) -> dict[str, GGUFTensor]:
        entries = [self._tensor_entry() for _ in range(count)]
        if not isinstance(alignment, int) or alignment < 1:
            raise self.corrupt(f"its alignment is {alignment!r}")
        start = -(-self.offset // alignment) * alignment
        tensors = {}
        for name, shape, type_id, offset in entries:
            if name in tensors:
                raise self.corrupt(f"tensor {name} occurs twice")
            tensor = GGUFTensor(name, shape, type_id, start + offset)
            self._check_tensor(tensor)
            tensors[name] = tensor
        return tensors

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise self.corrupt(f"tensor {name!r} has {num_dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def _check_tensor(self, tensor: GGUFTensor) -> None:
        if tensor.type_id not in TENSOR_TYPES:
            allowed = ", ".join(name for name, _, _ in TENSOR_TYPES.values())
            raise ConfigError(
                f"{self.path}: tensor {tensor.name} is stored as {_type_name(tensor.type_id)}, "
                f"which is not supported; supported are {allowed}."
            )
        shape = list(tensor.shape)
        where = f"tensor {tensor.name} ({tensor.type_name} {shape}, at byte {tensor.offset})"
        if 0 in shape:
            raise self.corrupt(f"{where} is empty")
        block = TENSOR_TYPES[tensor.type_id][1]
        if shape[-1] % block:
            raise self.corrupt(
                f"{where} has rows of {shape[-1]} numbers, which {tensor.type_name} stores in "
                f"blocks of {block}"
            )
        rows = 1
        for size in tensor.shape[:-1]:
            rows *= size
        end = tensor.offset + rows * tensor.row_bytes
        if end > len(self.data):
            raise self.corrupt(f"{where} ends at byte {end}, the file at {len(self.data)}")


def _type_name(type_id: int) -> str:
    """Return ggml's name of a type we do not read, or its number."""
    from gguf import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(type_id, f"type {type_id}")
