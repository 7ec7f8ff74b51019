"""Drafters that travel with Forerun, by name, and which target each is for. No torch.

A drafter is a folder here: a checkpoint, its temperatures and its model card.
"""

from __future__ import annotations

from pathlib import Path

from forerun.data.bundled import resolve_model_path

_FOLDER = Path(__file__).parent
_WEIGHTS = "model.safetensors"
# By the name of the bundled target.
_FOR_TARGET = {"smollm2-135m-instruct": "smollm2-135m-instruct-dspark"}


def find_shipped_drafter(target: str) -> str | None:
    """Return the name of the drafter that ships for a bundled target; None if there is none."""
    name = _FOR_TARGET.get(target)
    return name if name is not None and (_FOLDER / name / _WEIGHTS).is_file() else None


def resolve_drafter_path(model: str) -> Path:
    """Return the folder or file a drafter's `model` key means; raises ConfigError.

    A name of a shipped drafter comes first; anything else is what a model may be.
    """
    folder = _FOLDER / model
    if model in _FOR_TARGET.values() and folder.is_dir():
        return folder
    return resolve_model_path(model)
