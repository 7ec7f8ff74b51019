"""Damaged GGUF files: they load, or a ConfigError says why not; nothing else ever happens.

Damage is a function of its seed. Address space is limited meanwhile, so that a damaged size that
is believed shows as a failed allocation instead of a slow machine.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from forerun import kernels
from forerun.errors import ConfigError
from forerun.models.loader import load_model
from gguf_files import write_random

ROOM_BYTES = 2 * 2**30
SEEDS_PER_DAMAGE = 60
SIZES = [0, 1, 2, 31, 33, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 64, 2**62, 2**63, 2**64 - 1]
FLOATS = [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-45, 3e38]
KINDS = {"attn_q": Kind.Q5_0, "attn_k": Kind.Q8_0, "ffn_up": Kind.Q4_0, "ffn_down": Kind.Q5_1}
SHAPE = {"hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 40}


class Damage:
    """One file, to be damaged in place by one of the methods named `do_...`."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.rng = np.random.default_rng(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[self.rng.integers(len(choices))]

    def do_truncate(self) -> None:
        whole = self.path.read_bytes()
        self.path.write_bytes(whole[: self.rng.integers(len(whole))])

    def do_flip_header_bytes(self) -> None:
        self._flip(0, min(t.data_offset for t in self._read().tensors))

    def do_overwrite_block_bytes(self) -> None:
        """0x7C, 0x7F and 0xFF make scales infinite or NaN where they hit one."""
        start = min(t.data_offset for t in self._read().tensors)
        data = bytearray(self.path.read_bytes())
        for place in self.rng.integers(start, len(data), self.rng.integers(1, 100)):
            data[place] = self.pick([0x00, 0x7C, 0x7F, 0xFF])
        self.path.write_bytes(data)

    def do_change_header_counts(self) -> None:
        """Tensors and metadata pairs are counted in bytes 8 to 24."""
        data = bytearray(self.path.read_bytes())
        at = self.pick([8, 16])
        data[at : at + 8] = self.pick(SIZES).to_bytes(8, "little")
        self.path.write_bytes(data)

    def do_change_types(self) -> None:
        tensors = self._read("r+").tensors
        for _ in range(self.rng.integers(1, 4)):
            self.pick(tensors).field.parts[4][0] = self.rng.integers(0, 42)

    def do_change_shapes(self) -> None:
        dims = self._pick_tensor().field.parts[3]
        place = self.rng.integers(len(dims))
        near = int(dims[place]) + int(self.rng.integers(-40, 40))
        dims[place] = self.pick([*SIZES, max(near, 0), int(dims[place]) * 2])

    def do_change_dimension_counts(self) -> None:
        self._pick_tensor().field.parts[2][0] = self.pick([0, 1, 3, 4, 5, 2**31, 2**32 - 1])

    def do_change_offsets(self) -> None:
        part = self._pick_tensor().field.parts[5]
        near = int(part[0]) + int(self.rng.integers(-100, 100))
        part[0] = self.pick([*SIZES, max(near, 0), self.path.stat().st_size])

    def do_change_name_lengths(self) -> None:
        self._pick_tensor().field.parts[0][0] = self.pick(SIZES)

    def do_change_metadata(self) -> None:
        """Replace one number, count or length of the metadata, whatever it means."""
        fields = [f for name, f in self._read("r+").fields.items() if not name.startswith("GGUF")]
        parts = [p for f in fields for p in f.parts if p.dtype.itemsize >= 4]
        part = parts[self.rng.integers(len(parts))]
        if part.dtype.kind == "f":
            part[0] = self.pick(FLOATS)
        else:
            part[0] = self.pick([size for size in SIZES if size <= np.iinfo(part.dtype).max])

    def do_change_model_sizes(self) -> None:
        fields = self._read("r+").fields
        names = [name for name in fields if re.match(r"llama\.(?!rope|attention\.layer)", name)]
        for _ in range(self.rng.integers(1, 3)):
            part = fields[self.pick(names)].parts[-1]
            near = int(part[0]) + int(self.rng.integers(-3, 4))
            part[0] = self.pick([*SIZES[:9], max(near, 0), min(int(part[0]) * 2, 2**32 - 1)])

    def _flip(self, start: int, stop: int) -> None:
        data = bytearray(self.path.read_bytes())
        for place in self.rng.integers(start, stop, self.rng.integers(1, 9)):
            data[place] ^= int(self.rng.integers(1, 256))
        self.path.write_bytes(data)

    def _read(self, mode: str = "r") -> gguf.GGUFReader:
        return gguf.GGUFReader(self.path, mode)

    def _pick_tensor(self) -> gguf.ReaderTensor:
        return self.pick(self._read("r+").tensors)


DAMAGES = [name for name in dir(Damage) if name.startswith("do_")]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model with five formats, tied tables and every kind of metadata."""
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    write_random(path, kind=Kind.Q4_1, kinds=KINDS, drop_head=True, **SHAPE)
    return path.read_bytes()


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """Allow two gigabytes more than there are now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (room, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(params=["exact", "int8", "int8 without kernels"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return a function that loads a file in one mode."""
    quantization, _, rest = str(request.param).partition(" ")
    if rest:
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))

    def load(path: Path) -> None:
        load_model(path, dtype=torch.float32, quantization=quantization)

    return load


@pytest.mark.usefixtures("limited_memory")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_loads_or_is_refused(
    damage: str, load: Callable[[Path], None], healthy: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(healthy)
    load(path)
    refusals = []
    for seed in range(SEEDS_PER_DAMAGE):
        path.write_bytes(healthy)
        getattr(Damage(path, seed), damage)()
        try:
            load(path)
        except ConfigError as error:
            refusals.append(str(error))
        except Exception as error:
            raise AssertionError(f"{damage} with seed {seed}") from error
    assert refusals
    assert all(path.name in refusal for refusal in refusals)
