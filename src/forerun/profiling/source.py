"""Where an engine's cost profile comes from: a given file, the cache, or a measurement.

Each choice is logged with its reason. A profile that was measured for something else is never used.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from forerun.budget.costs.files import ProfileMismatch, load_profile
from forerun.budget.costs.profile import CostProfile
from forerun.logs import get_logger
from forerun.plan import Runner
from forerun.profiling.cache import find_profile, save_profile
from forerun.profiling.measure import MEASURED_BUSY, Progress, measure_profile
from forerun.profiling.shapes import ProfileLimits

logger = get_logger(__name__)


def obtain_profile(
    runner: Runner,
    key: Mapping[str, str],
    *,
    given_path: str = "",
    limits: ProfileLimits,
    progress: Progress | None = None,
    is_fresh: bool = False,
) -> CostProfile:
    """Return the given profile, else the stored one, else a measured one, which is stored.

    `is_fresh` measures in any case. A given path that holds no profile at all is a ConfigError.
    """
    profile = None if is_fresh else _find_ready(key, given_path)
    if profile is not None:
        return profile
    started_s = time.perf_counter()
    profile = measure_profile(runner, limits=limits, key=key, progress=progress)
    logger.info("cost profile: measured in %.1f s", time.perf_counter() - started_s)
    if profile.source == MEASURED_BUSY:
        logger.warning("cost profile not stored, it was disturbed: the next start measures again")
    else:
        _store(profile)
    return profile


def _find_ready(key: Mapping[str, str], given_path: str) -> CostProfile | None:
    if given_path:
        try:
            profile = load_profile(Path(given_path).expanduser(), key)
        except ProfileMismatch as error:
            logger.warning("cost profile given, but not used: %s", error)
        else:
            logger.info("cost profile: %s, as given", given_path)
            return profile
    stored, reason = find_profile(key)
    if stored is None:
        logger.info("cost profile: measuring it; %s", reason)
    else:
        logger.info("cost profile: %s, measured earlier", reason)
    return stored


def _store(profile: CostProfile) -> None:
    try:
        path = save_profile(profile)
    except OSError as error:
        logger.warning(
            "cost profile not stored (%s), so the next start measures again; set FORERUN_CACHE to "
            "a folder that can be written",
            error,
        )
    else:
        logger.info("cost profile: stored in %s", path)
