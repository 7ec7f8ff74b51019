"""Where the weights of a speculative configuration lie. No torch."""

from __future__ import annotations

from pathlib import Path

from forerun.data.bundled import resolve_model_path
from forerun.shipped_drafters import find_shipped_folder
from forerun.speculative_config import SpeculativeConfig


def find_drafter_path(config: SpeculativeConfig) -> Path | None:
    """Return the drafter's file or folder; None for a method without weights.

    A shipped drafter's name comes first; anything else is what a model may be. Raises ConfigError.
    """
    if not config.model:
        return None
    return find_shipped_folder(config.model) or resolve_model_path(config.model)
