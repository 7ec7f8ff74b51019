"""Models from disk: Hugging Face folders (safetensors) and GGUF files.

The model is built with untouched memory, filled from its files, and packed as the device computes
fastest. Every defect is a ConfigError.
"""

from __future__ import annotations

from pathlib import Path

import torch

from forerun.errors import ConfigError
from forerun.gguf_file import GGUFFile, read_gguf
from forerun.layers.linear import Linear, StoredBlocks
from forerun.models import GGUF_ARCHITECTURES, find_model_class
from forerun.models.block_plan import plan_blocks
from forerun.models.decoder import DecoderModel
from forerun.models.gguf import read_architecture
from forerun.models.gguf_tensors import GGUFTensors
from forerun.models.hf_tensors import HFTensors, read_json
from forerun.models.spec import Fields, ModelSpec
from forerun.models.stored import Progress, StoredTensors, check_tensors, fill_slots

QUANTIZATIONS = ("exact", "int8", "q8_0")


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
    quantization: str = "exact",
) -> DecoderModel:
    """Load a model folder or GGUF file; `progress` gets (pieces done, pieces in all).

    `pack` lets the model hold its weights as this machine computes fastest; unpacked ones can be
    read as parameters. `quantization` is exact (dequantise everything), int8 (multiply quantised
    weights as they are stored) or q8_0 (the same, and float weights become Q8_0); the last two need
    a CPU and packed weights.
    """
    assert pack or quantization == "exact", "quantised weights have no unpacked form"
    stored: StoredTensors
    if _is_gguf(path):
        file = read_gguf(path)
        family, spec = _read_gguf_spec(file)
        stored = GGUFTensors(file, family, spec)
    else:
        family, spec = _read_hf_spec(path)
        stored = HFTensors(path, family, spec)
    model = family(spec, dtype, device)
    blocks = _load_weights(model, stored, progress, quantization)
    if pack:
        model.pack_weights(blocks)
    return model.eval()


def _load_weights(
    model: DecoderModel, stored: StoredTensors, progress: Progress | None, quantization: str
) -> dict[Linear, StoredBlocks]:
    """Fill what is not held in blocks; return where those come from."""
    assert quantization in QUANTIZATIONS, quantization
    slots = model.slots()
    check_tensors(stored, slots)
    is_exact = quantization == "exact"
    plans = {} if is_exact else plan_blocks(model, stored, quantise_floats=quantization == "q8_0")
    in_blocks = {name for plan in plans.values() for name in plan.parts}
    plain = {name: slot for name, slot in slots.items() if name not in in_blocks}
    counter = fill_slots(stored, plain, progress, num_more=len(plans))
    return {linear: plan.bind(stored, counter.advance) for linear, plan in plans.items()}


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
    config = read_json(path / "config.json")
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
        extra = Fields(read_json(generation), generation.name).token_ids("eos_token_id")
        own = Fields(config, "config.json").token_ids("eos_token_id")
        config["eos_token_id"] = list(own + extra)
    return family, family.spec_from_hf(Fields(config, "config.json"))
