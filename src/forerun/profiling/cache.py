"""Measured cost profiles on disk, in the user's cache folder: one readable file per key.

Files are written whole or not at all. One that cannot be used is never an error: the reason comes
back with None, and the caller measures again. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from forerun import env
from forerun.budget.costs.files import ProfileMismatch, load_profile, write_profile
from forerun.budget.costs.profile import CostProfile
from forerun.errors import ConfigError


def find_profile(key: Mapping[str, str]) -> tuple[CostProfile | None, str]:
    """Return (the profile measured for this key, where it is), or (None, why there is none)."""
    path = locate_profile(key)
    if not path.is_file():
        return None, "none is stored for this model, drafter and machine"
    try:
        profile = load_profile(path, key)
        if not profile.key:
            raise ProfileMismatch(f"{path} does not say what it was measured for")
    except (ConfigError, ProfileMismatch) as error:
        return None, str(error)
    return replace(profile, source=f"cache:{path}"), str(path)


def save_profile(profile: CostProfile) -> Path:
    """Store a profile under its key and return the file; may raise OSError."""
    path = locate_profile(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, path)
    return path


def locate_profile(key: Mapping[str, str]) -> Path:
    """Return the file that the profile of a key is stored in."""
    text = json.dumps(dict(key), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return env.cache_dir() / "profiles" / f"{digest}.json"
