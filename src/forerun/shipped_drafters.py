"""Drafters that travel with Forerun, by name, and which target each is for. No torch.

A drafter is a folder of data/drafters: a checkpoint, its temperatures and its model card.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent / "data" / "drafters"
_WEIGHTS = "model.safetensors"
# By the name of the bundled target.
_FOR_TARGET = {"smollm2-135m-instruct": "smollm2-135m-instruct-dspark"}


def find_shipped_drafter(target: str) -> str | None:
    """Return the name of the drafter that ships for a bundled target; None if there is none."""
    name = _FOR_TARGET.get(target)
    return name if name is not None and find_shipped_folder(name) is not None else None


def find_shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped drafter by its name; None if none is called that."""
    folder = _FOLDER / name
    return folder if name in _FOR_TARGET.values() and (folder / _WEIGHTS).is_file() else None
