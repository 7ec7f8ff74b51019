"""The tensors of a Hugging Face folder (safetensors), by local weight names."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.decoder import DecoderModel
from forerun.models.layer import WeightSlot
from forerun.models.spec import Fields, ModelSpec
from forerun.models.stored import fill
from forerun.quantisation.formats import BlockFormat, BlockTensor
from forerun.quantisation.quantise import quantise


class HFTensors:
    """StoredTensors of a folder; raises ConfigError if its files cannot be read."""

    num_threads = 1

    def __init__(self, path: Path, family: type[DecoderModel], spec: ModelSpec) -> None:
        self.path = path
        self._family = family
        self._spec = spec
        with self._refuse_corrupt():
            handles = [safe_open(file, framework="pt") for file in find_weight_files(path)]
            self._owners = {name: h for h in handles for name in h.keys()}  # noqa: SIM118

    def stored_name(self, name: str) -> str:
        """Return Hugging Face's name of a weight."""
        return self._family.hf_name(name)

    def read_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return all shapes but those of tensors that repeat what is known without them."""
        ignored = {name for name in self._owners if name.endswith("rotary_emb.inv_freq")}
        if self._spec.tie_word_embeddings:
            ignored.add("lm_head.weight")
        with self._refuse_corrupt():
            return {
                name: tuple(owner.get_slice(name).get_shape())
                for name, owner in self._owners.items()
                if name not in ignored
            }

    def find_type(self, name: str) -> str:
        """Return safetensors' name of the type, which for floats is ggml's."""
        stored = self.stored_name(name)
        with self._refuse_corrupt():
            return str(self._owners[stored].get_slice(stored).get_dtype())

    def split_fill(self, name: str, slot: WeightSlot) -> list[Callable[[], None]]:
        """Return one job."""
        return [lambda: self._fill(name, slot)]

    def read_blocks(self, name: str, kind: BlockFormat) -> BlockTensor:
        """Return a weight in Q8_0, the one format that is made from floats."""
        return BlockTensor(quantise(self._read(name), self.stored_name(name)), kind)

    def release(self, name: str) -> None:
        """Do nothing: tensors are read to memory of their own."""

    def _fill(self, name: str, slot: WeightSlot) -> None:
        fill(slot, self._read(name))
        if name.endswith("norm.weight") and self._family.hf_norm_offset:
            slot.destination.add_(self._family.hf_norm_offset)

    def _read(self, name: str) -> Tensor:
        stored = self.stored_name(name)
        with self._refuse_corrupt():
            tensor: Tensor = self._owners[stored].get_tensor(stored)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{self.path}: tensor {stored} is stored as {kind}; supported are bfloat16, "
                "float16 and float32."
            )
        return tensor

    @contextlib.contextmanager
    def _refuse_corrupt(self) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{self.path} has a truncated or corrupt safetensors file: {error}."
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a model folder."""
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; it is not a complete model folder.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return value


def find_weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, those of its index where there is one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        mapping = Fields(read_json(index), index.name).mapping("weight_map")
        if mapping is None:
            raise ConfigError(f"{index} lacks 'weight_map'.")
        files = [path / str(name) for name in dict.fromkeys(mapping.values.values())]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{path} has no .safetensors files; convert the weights to safetensors.")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{path} lacks {file.name}, which its index names.")
    return files
