"""Drafters that travel with Forerun, by name, and which target each is for. No torch.

A drafter is a folder of data/drafters: a checkpoint, its temperatures and its model card.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SHIPPED_FOLDER = Path(__file__).parent / "data" / "drafters"
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ShippedDrafter:
    """A block drafter: its name, and the drafts of its full block."""

    name: str
    num_speculative_tokens: int


# By the name of the bundled target.
SHIPPED_FOR_TARGET = {"smollm2-135m-instruct": ShippedDrafter("smollm2-135m-instruct-dspark", 5)}


def find_shipped_drafter(target: str) -> ShippedDrafter | None:
    """Return the drafter that ships for a bundled target; None if there is none."""
    drafter = SHIPPED_FOR_TARGET.get(target)
    return drafter if drafter is not None and find_shipped_folder(drafter.name) else None


def find_shipped_folder(name: str) -> Path | None:
    """Return the folder of a shipped drafter by its name; None if none is called that."""
    names = {drafter.name for drafter in SHIPPED_FOR_TARGET.values()}
    folder = SHIPPED_FOLDER / name
    return folder if name in names and (folder / _WEIGHTS).is_file() else None
