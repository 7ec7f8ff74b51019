"""Block drafters on disk: read, check against a target, write. Every defect is a ConfigError.

Read are the three dialects of dialects.py, with tensors under one set of names. Written is that of
speculators, which vLLM loads: layers counted by their inputs, the draft vocabulary as offsets (d2t)
and as a mask of the target's (t2d), the target's own tables left out. Of a reduced vocabulary the
rows of the head are written all the same, because vLLM wants them; `includes_head` leaves them out.
Shapes: d hidden_size, V target and Vd draft vocabulary.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.dspark.dialects import parse_config
from forerun.drafters.dspark.network import DSparkNetwork
from forerun.errors import ConfigError
from forerun.models.hf_tensors import find_weight_files, read_json
from forerun.models.stored import Shape, check_shapes

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
TARGET_TABLES = ("embed_tokens.weight", "lm_head.weight")
_ARCHITECTURES = {"dspark": "DSparkSpeculator", "dflash": "DFlashSpeculator"}


def read_dspark_config(folder: Path) -> DSparkConfig:
    """Read what a drafter is made of, without its weights."""
    values, stored = read_json(folder / CONFIG_FILE), _open_tensors(folder)
    try:
        return parse_config(values, stored)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from error


def load_dspark_tensors(folder: Path, config: DSparkConfig) -> dict[str, Tensor]:
    """Return the stored tensors by the network's names.

    The target's tables are among them only if stored. `d2t` holds the target id of every draft id,
    and is there only if the draft vocabulary is reduced.
    """
    stored = _open_tensors(folder)
    shapes = {name: tensor.shape for name, tensor in stored.items() if not _is_ignored(name)}
    wanted = _find_shapes(config)
    for name in (*TARGET_TABLES, "d2t"):
        if name not in shapes and (name != "d2t" or not config.has_reduced_vocab):
            del wanted[name]
    check_shapes(folder, shapes, wanted)
    with _refuse_corrupt(folder):
        tensors = {name: stored[name].read() for name in wanted}
        mask = stored["t2d"].read() if "t2d" in stored else None
    _check_types(folder, tensors)
    if "d2t" in tensors:
        target_ids = _resolve_draft_ids(folder, tensors.pop("d2t"), mask, config)
        tensors |= {"d2t": target_ids} if config.has_reduced_vocab else {}
    return tensors


def load_network(folder: Path) -> DSparkNetwork:
    """Load a drafter in float32.

    If it lacks the target's tables they are NaN until `share_target`.
    """
    config = read_dspark_config(folder)
    tensors = load_dspark_tensors(folder, config)
    with torch.device("meta"):
        network = DSparkNetwork(config)
    network.to_empty(device="cpu")
    missing = [name for name in TARGET_TABLES if name not in tensors]
    tensors.setdefault("d2t", torch.arange(config.draft_vocab_size))
    network.load_state_dict(tensors, strict=False)
    for name in missing:
        torch.nn.init.constant_(network.get_parameter(name), torch.nan)
    network.shares_target = bool(missing)
    return network


def check_target(
    config: DSparkConfig, *, hidden_size: int, vocab_size: int, num_layers: int
) -> None:
    """Raise ConfigError if the drafter was made for another target."""
    made_for = f" It was trained for {config.verifier}." if config.verifier else ""
    for name, own, target in (
        ("hidden size", config.hidden_size, hidden_size),
        ("vocabulary size", config.vocab_size, vocab_size),
    ):
        if own != target:
            raise ConfigError(
                f"the drafter was made for a target of {name} {own}; this one has {target}."
                f"{made_for} Use a drafter of this target."
            )
    last = config.target_layer_ids[-1]
    if last > num_layers - 2:
        raise ConfigError(
            f"the drafter taps layer {last}; a target of {num_layers} layers allows -1 to "
            f"{num_layers - 2} (the last layer is not tapped).{made_for} Use a drafter of this "
            "target."
        )


def save_checkpoint(
    folder: Path,
    network: DSparkNetwork,
    *,
    dtype: torch.dtype = torch.bfloat16,
    extra: Mapping[str, Any] | None = None,
    includes_head: bool = True,
) -> None:
    """Write a drafter; `extra` are more keys of its config.json.

    Each file replaces its predecessor at once, config.json last.
    """
    values = _describe(network.config, dtype)
    clashing = values.keys() & (extra or {}).keys()
    assert not clashing, f"keys of the dialect itself: {sorted(clashing)}"
    skipped = _choose_skipped(network, includes_head=includes_head)
    tensors = _collect_tensors(network, dtype, skipped)
    text = json.dumps({**values, **(extra or {})}, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / WEIGHTS_FILE, lambda path: save_file(tensors, path, {"format": "pt"}))
    _replace(folder / CONFIG_FILE, lambda path: path.write_text(text, encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """One tensor of an open file."""

    handle: Any
    name: str
    shape: Shape

    def read(self) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(self.name)
        return tensor


def _open_tensors(folder: Path) -> dict[str, _StoredTensor]:
    """Return all tensors by their names without prefix; reads headers only."""
    tensors = {}
    with _refuse_corrupt(folder):
        for file in find_weight_files(folder):
            handle = safe_open(file, framework="pt")
            for name in handle.keys():  # noqa: SIM118
                shape = tuple(handle.get_slice(name).get_shape())
                tensors[name.removeprefix("model.")] = _StoredTensor(handle, name, shape)
    return tensors


@contextlib.contextmanager
def _refuse_corrupt(folder: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{folder} has a truncated or corrupt safetensors file: {error}; copy or train the "
            "drafter again."
        ) from error


def _is_ignored(name: str) -> bool:
    """Whether a tensor repeats what is known without it."""
    return name == "t2d" or name.startswith("verifier_") or name.endswith("inv_freq")


def _find_shapes(config: DSparkConfig) -> dict[str, Shape]:
    with torch.device("meta"):
        state = DSparkNetwork(config).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _check_types(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        is_float = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
        if is_float if name == "d2t" else not is_float:
            kind = str(tensor.dtype).removeprefix("torch.")
            allowed = "integers" if name == "d2t" else "bfloat16, float16 or float32"
            raise ConfigError(f"{folder}: tensor {name} is stored as {kind}; supported: {allowed}.")


def _resolve_draft_ids(
    folder: Path, offsets: Tensor, mask: Tensor | None, config: DSparkConfig
) -> Tensor:
    """Return the target id of every draft id [Vd], checked against the mask [V]."""
    target_ids = offsets.long() + torch.arange(len(offsets))
    rises = bool((target_ids.diff() > 0).all())
    if not rises or target_ids[0] < 0 or target_ids[-1] >= config.vocab_size:
        raise ConfigError(
            f"{folder}: tensor d2t must give every draft token a target id below "
            f"{config.vocab_size}, in rising order, as an offset from its own id; it does not."
        )
    if mask is not None and not torch.equal(mask.nonzero().flatten(), target_ids):
        raise ConfigError(
            f"{folder}: tensors d2t and t2d name different target tokens; the files do not belong "
            "together."
        )
    return target_ids


def _choose_skipped(network: DSparkNetwork, *, includes_head: bool) -> Sequence[str]:
    """Return the target's tables that are not written."""
    embed, head = TARGET_TABLES
    if not network.shares_target:
        return ()
    is_known = not bool(network.lm_head.weight.isnan().any())
    if network.config.has_reduced_vocab and includes_head and is_known:
        return (embed,)
    return (embed, head)


def _collect_tensors(
    network: DSparkNetwork, dtype: torch.dtype, skipped: Sequence[str]
) -> dict[str, Tensor]:
    config = network.config
    tensors = {
        name: weight.detach().to("cpu", dtype).contiguous()
        for name, weight in network.named_parameters()
        if name not in skipped
    }
    if config.has_reduced_vocab:
        target_ids = network.d2t.cpu()
        tensors["d2t"] = target_ids - torch.arange(len(target_ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][target_ids] = True
    return tensors


def _describe(config: DSparkConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json as speculators writes it."""
    return {
        "architectures": [_ARCHITECTURES[config.method]],
        "speculators_model_type": config.method,
        "transformer_layer_config": _describe_layers(config),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.num_slots,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": True,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.has_confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
        "tie_word_embeddings": False,
        "dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": config.method,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": config.verifier, "architectures": []},
        },
    }


def _describe_layers(config: DSparkConfig) -> dict[str, Any]:
    assert config.flavour == "qwen3", "the written dialect has Qwen3 layers"
    assert config.rope_freq_factors is None, "the written dialect has plain rotary frequencies"
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": ["full_attention"] * config.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place, then move it there."""
    partial = path.with_name(f".{path.name}.partial")
    write(partial)
    partial.replace(path)
