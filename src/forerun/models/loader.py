"""Weights from disk into a model: Hugging Face folders (safetensors) and GGUF files.

The model is built with untouched memory and every stored tensor is copied into its slot, a view of
the final weight; so weights are resident once, and a merged or reordered weight needs no rule here.
Names and shapes are checked before any weight is read. Every defect is a ConfigError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import ConfigError
from forerun.gguf_file import GGUFFile, GGUFTensor, read_gguf
from forerun.models import GGUF_ARCHITECTURES, find_model_class
from forerun.models.decoder import DecoderModel
from forerun.models.gguf import ROPE_FREQS, gguf_name, read_architecture
from forerun.models.layer import WeightSlot
from forerun.models.spec import Fields, ModelSpec

Progress = Callable[[int, int], None]
_CHUNK_NUMBERS = 2**22
_MAX_THREADS = 8


def read_model_spec(path: Path) -> ModelSpec:
    """Read what a model is made of, without its weights; raises ConfigError."""
    if _is_gguf(path):
        return _read_gguf_spec(read_gguf(path))[1]
    return _read_hf_spec(path)[1]


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    pack: bool = True,
) -> DecoderModel:
    """Load a model folder or GGUF file; `progress` gets (tensors done, tensors in all).

    `pack` lets the model hold its weights as this machine computes fastest; unpacked ones can be
    read as parameters.
    """
    if _is_gguf(path):
        file = read_gguf(path)
        family, spec = _read_gguf_spec(file)
        model = family(spec, dtype, device)
        _load_gguf(model, file, progress)
    else:
        family, spec = _read_hf_spec(path)
        files = _find_weight_files(path)
        model = family(spec, dtype, device)
        _load_hf(model, path, files, progress)
    if pack:
        model.pack_weights()
    return model.eval()


def random_model(
    spec: ModelSpec,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    pack: bool = True,
) -> DecoderModel:
    """Return a model with random weights scaled to keep activations and logits lively."""
    model = find_model_class(spec.architecture)(spec, dtype, device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, slot in model.slots().items():
        if name.endswith("norm.weight"):
            slot.destination.uniform_(0.5, 1.5, generator=generator)
        else:
            slot.destination.normal_(0.0, slot.shape[-1] ** -0.5, generator=generator)
    if pack:
        model.pack_weights()
    return model.eval()


def _is_gguf(path: Path) -> bool:
    if not path.exists():
        raise ConfigError(f"model path {path} does not exist; give a model folder or a GGUF file.")
    if path.is_dir():
        return False
    if path.suffix == ".gguf":
        return True
    raise ConfigError(f"model path {path} is neither a folder nor a .gguf file.")


def _read_gguf_spec(file: GGUFFile) -> tuple[type[DecoderModel], ModelSpec]:
    architecture = read_architecture(file)
    if architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}."
        )
    family = find_model_class(GGUF_ARCHITECTURES[architecture])
    return family, family.spec_from_gguf(file)


def _read_hf_spec(path: Path) -> tuple[type[DecoderModel], ModelSpec]:
    config = _read_json(path / "config.json")
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{path / 'config.json'} lacks 'architectures', a list with one name.")
    if config.get("quantization_config"):
        raise ConfigError(
            f"{path} holds quantised weights (quantization_config); only unquantised safetensors "
            "folders and GGUF files are supported."
        )
    family = find_model_class(str(names[0]))
    generation = path / "generation_config.json"
    if generation.is_file():
        extra = Fields(_read_json(generation), generation.name).token_ids("eos_token_id")
        own = Fields(config, "config.json").token_ids("eos_token_id")
        config["eos_token_id"] = list(own + extra)
    return family, family.spec_from_hf(Fields(config, "config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}; it is not a complete model folder.")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return value


def _find_weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a folder, those of its index where there is one."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        mapping = Fields(_read_json(index), index.name).mapping("weight_map")
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


def _load_hf(
    model: DecoderModel, path: Path, files: Iterable[Path], progress: Progress | None
) -> None:
    slots = {model.hf_name(name): slot for name, slot in model.slots().items()}
    try:
        handles = [safe_open(file, framework="pt") for file in files]
        owners = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118
        shapes = {n: tuple(owner.get_slice(n).get_shape()) for n, owner in owners.items()}
        ignored = {name for name in shapes if name.endswith("rotary_emb.inv_freq")}
        if model.spec.tie_word_embeddings:
            ignored.add("lm_head.weight")
        _check_tensors(path, slots, shapes, ignored)
        for done, (name, slot) in enumerate(slots.items(), start=1):
            tensor = owners[name].get_tensor(name)
            _check_float(path, name, tensor)
            _fill(slot, tensor)
            if name.endswith("norm.weight") and model.hf_norm_offset:
                slot.destination.add_(model.hf_norm_offset)
            if progress is not None:
                progress(done, len(slots))
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} has a truncated or corrupt safetensors file: {error}."
        ) from error


def _check_float(path: Path, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{path}: tensor {name} is stored as {kind}; supported are bfloat16, float16 and "
            "float32."
        )


def _check_tensors(
    path: Path,
    slots: Mapping[str, WeightSlot],
    shapes: Mapping[str, tuple[int, ...]],
    ignored: set[str],
) -> None:
    """Raise ConfigError naming missing, unused or wrongly shaped tensors."""
    missing = [name for name in slots if name not in shapes]
    if missing:
        raise ConfigError(f"{path} lacks {_list_names(missing)}; the weights are incomplete.")
    unused = [name for name in shapes if name not in slots and name not in ignored]
    if unused:
        raise ConfigError(
            f"{path} has {_list_names(unused)} that its configuration has no place for; "
            "configuration and weights do not belong together."
        )
    for name, slot in slots.items():
        if shapes[name] != slot.shape:
            raise ConfigError(
                f"{path}: tensor {name} has shape {list(shapes[name])}; the configuration says "
                f"{list(slot.shape)}."
            )


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{'tensor' if len(names) == 1 else 'tensors'} {shown}{rest}"


def _fill(slot: WeightSlot, tensor: Tensor) -> None:
    destination = slot.destination
    if tensor.numel() == destination.numel():
        tensor = tensor.reshape(destination.shape)
    destination.copy_(tensor)


def _load_gguf(model: DecoderModel, file: GGUFFile, progress: Progress | None) -> None:
    """Dequantise tensor by tensor, large ones in chunks of rows, on a few threads."""
    slots = {gguf_name(name): slot for name, slot in _gguf_slots(model).items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    _check_tensors(file.path, slots, shapes, {ROPE_FREQS})
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads) as pool:
        jobs = [
            pool.submit(_fill_rows, slot, file, file.tensors[name], start, stop)
            for name, slot in slots.items()
            for start, stop in _split_rows(file.tensors[name], slot)
        ]
        for done, job in enumerate(as_completed(jobs), start=1):
            job.result()
            if progress is not None:
                progress(done, len(jobs))


def _gguf_slots(model: DecoderModel) -> dict[str, WeightSlot]:
    """Return the slots by local name, with q and k seen in GGUF's row order where it differs."""
    slots = model.slots()
    if not model.gguf_permutes_heads:
        return slots
    head_dim = model.spec.head_dim
    for name, slot in slots.items():
        if name.split(".")[-2] in ("q", "k"):
            rest = slot.shape[1:]
            halves = slot.destination.view(-1, 2, head_dim // 2, *rest)
            slots[name] = WeightSlot(halves.transpose(1, 2), slot.shape)
    return slots


def _split_rows(tensor: GGUFTensor, slot: WeightSlot) -> list[tuple[int, int]]:
    rows = tensor.num_rows
    if tuple(slot.destination.shape) != slot.shape:
        return [(0, rows)]
    step = max(1, _CHUNK_NUMBERS // tensor.shape[-1])
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _fill_rows(slot: WeightSlot, file: GGUFFile, tensor: GGUFTensor, start: int, stop: int) -> None:
    values = torch.from_numpy(file.read_rows(tensor, start, stop))
    if stop - start == tensor.num_rows:
        _fill(slot, values.reshape(slot.shape))
    else:
        slot.destination[start:stop] = values
