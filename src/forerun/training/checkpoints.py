"""Training checkpoints: everything a resumed run needs, written whole, the last two kept.

One safetensors file each: the optimiser's tensors, the draft vocabulary, and in its metadata the
step, the network's configuration and the settings. The frozen tables are the target's and are not
in it. The order of the data and the anchors follow from the seed and the step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.drafters.dspark.config import DSparkConfig
from forerun.errors import ConfigError

_NUM_KEPT = 2
_PATTERN = "checkpoint-*.safetensors"


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """A point to go on from: `num_done` steps are in its tensors, which took `train_s` seconds."""

    num_done: int
    train_s: float
    config: DSparkConfig
    settings: dict[str, Any]
    tensors: dict[str, Tensor]  # the optimiser's, and "d2t"


def find_checkpoint(folder: Path) -> Path | None:
    """Return the latest checkpoint of a folder."""
    return max(folder.glob(_PATTERN), default=None)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint, then delete all but the last two; raises ConfigError."""
    path = folder / f"checkpoint-{checkpoint.num_done:08d}.safetensors"
    partial = path.with_suffix(".partial")
    facts = {
        "num_done": checkpoint.num_done,
        "train_s": checkpoint.train_s,
        "config": asdict(checkpoint.config),
        "settings": checkpoint.settings,
    }
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, partial, {"training": json.dumps(facts)})
        partial.replace(path)
        for old in sorted(folder.glob(_PATTERN))[:-_NUM_KEPT]:
            old.unlink()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be written ({error}); the last ones are kept.") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raises ConfigError where it is not a complete one."""
    try:
        with safe_open(path, "pt") as file:
            facts = json.loads((file.metadata() or {})["training"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return Checkpoint(
            num_done=int(facts["num_done"]),
            train_s=float(facts["train_s"]),
            config=_read_config(facts["config"]),
            settings=dict(facts["settings"]),
            tensors=tensors,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a complete checkpoint ({error}); delete it to go on from the one "
            "before."
        ) from error


def _read_config(values: Mapping[str, Any]) -> DSparkConfig:
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return DSparkConfig(**{**values, **lists})
