"""Reads the key/value section of a GGUF file, and nothing after it.

`gguf.GGUFReader` builds numpy views of every string and also maps all tensors: seconds for a
150,000-token vocabulary, in every process that needs a tokenizer. This walk takes a tenth of one.
Layout (versions 2 and 3, little-endian): magic, u32 version, u64 tensors, u64 pairs; then per pair
a string key, u32 type and the value. A string is u64 length and bytes; an array u32 type, u64 count
and its items.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?"}
_SCALARS |= {10: "u8", 11: "i8", 12: "f8"}
_DTYPES = {code: np.dtype(f"<{name}") for code, name in _SCALARS.items()}
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Return all key/value pairs: scalars, strings, lists of strings and numpy arrays."""
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ConfigError(f"{path} is not a GGUF file: it does not start with 'GGUF'.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _MetadataWalk(data).read_pairs()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the header of {path} is damaged or cut off ({error}); get the file again."
        ) from error


class _MetadataWalk:
    """A cursor over the mapped file; every read checks that it stays inside."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = len(_MAGIC)

    def read_pairs(self) -> dict[str, Any]:
        """Read the counts, then every pair."""
        version = self._read_scalar(4)
        if version not in (2, 3):
            raise ConfigError(
                f"GGUF version {version} is not supported (2 and 3 are, little-endian); "
                "convert the model again."
            )
        self._read_scalar(10)  # number of tensors
        num_pairs = self._read_scalar(10)
        pairs: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._read_string()
            pairs[key] = self._read_value(self._read_scalar(4))
        return pairs

    def _read_value(self, type_code: int) -> Any:
        if type_code == _STRING:
            return self._read_string()
        if type_code == _ARRAY:
            return self._read_array()
        return self._read_scalar(type_code)

    def _read_array(self) -> list[str] | np.ndarray[Any, Any]:
        item_code, count = self._read_scalar(4), self._read_scalar(10)
        if item_code == _STRING:
            return [self._read_string() for _ in range(count)]
        return self._read_numbers(item_code, count)

    def _read_scalar(self, type_code: int) -> Any:
        return self._read_numbers(type_code, 1)[0].item()

    def _read_numbers(self, type_code: int, count: int) -> np.ndarray[Any, Any]:
        if type_code not in _DTYPES:
            raise ValueError(f"unknown value type {type_code}")
        dtype = _DTYPES[type_code]
        # A copy, because views would keep the file mapped.
        values = np.frombuffer(self._data, dtype, count, self._at).copy()
        self._at += values.nbytes
        return values

    def _read_string(self) -> str:
        (length,) = _U64.unpack_from(self._data, self._at)
        start = self._at + _U64.size
        self._at = start + length
        if self._at > len(self._data):
            raise ValueError("a string ends after the file")
        return self._data[start : self._at].decode("utf-8")
