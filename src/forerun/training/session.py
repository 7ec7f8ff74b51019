"""From folders and settings to a trainer: a new run, or one that goes on from its last checkpoint.

Raises ConfigError for data without answers, another target, or settings that make another network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from forerun.data.bundled import resolve_model_path
from forerun.drafters.dspark.network import DSparkNetwork
from forerun.errors import ConfigError
from forerun.logs import get_logger
from forerun.training.answers.dataset import Dataset
from forerun.training.checkpoints import Checkpoint, find_checkpoint, read_checkpoint
from forerun.training.distributed import Processes
from forerun.training.initialise import Target, build_network
from forerun.training.objective.batch_loss import choose_compute_dtype
from forerun.training.settings import STRUCTURAL, TrainSettings
from forerun.training.trainer import CHECKPOINTS, Trainer, TrainReport

logger = get_logger(__name__)


def open_session(
    data: Path,
    output: Path,
    settings: TrainSettings,
    report: Callable[[TrainReport], None],
    *,
    target: str | None = None,
) -> tuple[Trainer, Processes]:
    """Return a trainer ready to run, and the processes it is one of."""
    device = resolve_device(settings.device)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    processes = Processes.join(device)
    device = processes.choose_device(device)
    dataset = Dataset(
        data,
        heldout_frac=settings.heldout_frac,
        shuffle_shards=settings.shuffle_shards,
        seed=settings.seed,
    )
    model = Target(resolve_model_path(target or dataset.manifest.model), dataset)
    checkpoint = _read_last(output, settings, dataset)
    if checkpoint is None:
        network = build_network(model, dataset, settings)
    else:
        network = _rebuild_network(checkpoint, model)
    trainer = Trainer(
        network.to(device),
        dataset,
        settings,
        output=output,
        dtype=choose_compute_dtype(device),
        report=report,
        processes=processes,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    _describe(trainer, network, dataset, device)
    return trainer, processes


def resolve_device(given: str) -> torch.device:
    """Return the device to train on; raises ConfigError."""
    if given == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {given} cannot be used: {error}; give cpu or auto.") from error
    return device


def _read_last(output: Path, settings: TrainSettings, dataset: Dataset) -> Checkpoint | None:
    """Return the checkpoint to go on from, if it is one of this network and data."""
    path = find_checkpoint(output / CHECKPOINTS)
    if path is None:
        return None
    checkpoint = read_checkpoint(path)
    own, stored = asdict(settings), checkpoint.settings
    for name in STRUCTURAL:
        _require_same(output, name, stored.get(name), own[name])
    layers = dataset.manifest.target_layer_ids
    _require_same(output, "target_layer_ids", checkpoint.config.target_layer_ids, layers)
    changed = {k: v for k, v in own.items() if k in stored and stored[k] != v}
    logger.info("going on from %s%s", path, f", changed: {changed}" if changed else "")
    return checkpoint


def _require_same(output: Path, name: str, stored: Any, given: Any) -> None:
    if stored != given:
        raise ConfigError(
            f"{output} holds a run with {name} {stored}, this one has {given}; give {stored} or "
            "another --output."
        )


def _rebuild_network(checkpoint: Checkpoint, target: Target) -> DSparkNetwork:
    network = DSparkNetwork(checkpoint.config)
    network.set_draft_vocabulary(checkpoint.tensors["d2t"])
    network.share_target(target.embed, target.head)
    return network


def _describe(
    trainer: Trainer, network: DSparkNetwork, dataset: Dataset, device: torch.device
) -> None:
    config = network.config
    num_trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    logger.info(
        "%s drafter of %.1f M trainable numbers on %s, mask token %d, taps %s; %d answers to train "
        "on, %d held out; %d steps done",
        config.method,
        num_trainable / 1e6,
        device,
        config.mask_token_id,
        list(config.target_layer_ids),
        dataset.num_training,
        len(dataset.heldout),
        trainer.num_done,
    )
