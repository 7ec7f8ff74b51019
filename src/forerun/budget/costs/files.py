"""Cost profiles in files: our own JSON, and tables that other engines measured.

The format is recognised by content. vLLM's `bench forward --output-json` is a list of timed shapes;
SGLang's tables are an object of sampled sizes. Neither says what it was measured for, so both are
taken on trust, with a line in the log. Nothing here measures or decides. T rows per request, N
requests, C cached tokens of each, d drafts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from forerun.budget.costs.profile import FORMAT, CostProfile
from forerun.budget.costs.timed_shapes import fit_timed_shapes
from forerun.errors import ConfigError
from forerun.logs import get_logger

logger = get_logger(__name__)

_READABLE = (
    "a file that `forerun profile --output` wrote, the output of vLLM's `bench forward "
    "--output-json`, or a table of SGLang's dspark_sps_profiler"
)
_ADDITIVE = ("bias_seconds", "bs_probes", "alpha_seconds", "m_probes", "theta_seconds")
_RATES = ("sample_batch_tokens", "sample_steps_per_sec")


class ProfileMismatch(Exception):  # noqa: N818 (a state of a file, not a mistake)
    """A profile that cannot be used here: corrupt, or measured for something else."""


def load_profile(path: Path, key: Mapping[str, str] | None = None) -> CostProfile:
    """Return the profile in a file.

    Raises ConfigError if there is no such file or it is something else altogether, and
    ProfileMismatch if it is corrupt or was measured for another key.
    """
    value = _read_json(path)
    source = f"file:{path}"
    try:
        if isinstance(value, dict) and "format" in value:
            profile = CostProfile.from_dict(value, source=source)
        elif isinstance(value, dict) and set(_ADDITIVE) <= value.keys():
            profile = _read_additive(value, source)
        elif isinstance(value, dict) and set(_RATES) <= value.keys():
            profile = _read_rates(value, source)
        elif _is_timed_shapes(value):
            profile = fit_timed_shapes(value, source)
        else:
            raise ConfigError(f"{path} holds {_describe(value)}; a cost profile is {_READABLE}.")
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ProfileMismatch(f"{path} is damaged: {error}") from error
    if not profile.key:
        logger.info("%s does not say what it was measured for; taken on trust", path)
    difference = explain_difference(profile.key, key or {})
    if profile.key and difference is not None:
        raise ProfileMismatch(f"{path} was {difference}")
    return profile


def explain_difference(measured: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return how the key a profile was measured for differs from the wanted one; None: it does not.

    Names only one of them has count as different.
    """
    if not wanted:
        return None
    names = [n for n in {**wanted, **measured} if measured.get(n) != wanted.get(n)]
    if not names:
        return None
    parts = [
        f"{name} {measured.get(name, '(unknown)')}, this engine has {wanted.get(name, 'none')}"
        for name in names
    ]
    more = f", and {len(parts) - 3} more differences" if len(parts) > 3 else ""
    return "measured for " + "; ".join(parts[:3]) + more


def write_profile(profile: CostProfile, path: Path) -> None:
    """Write a profile as JSON, whole or not at all; may raise OSError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(format_profile(profile))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def format_profile(profile: CostProfile) -> str:
    """Return the JSON text of a profile, one measured size per line."""
    return "{\n" + ",\n".join(_format_entry(*item) for item in profile.to_dict().items()) + "\n}\n"


def _format_entry(name: str, value: Any) -> str:
    if isinstance(value, list) and value:
        text = "[\n    " + ",\n    ".join(json.dumps(item) for item in value) + "\n  ]"
    else:
        text = json.dumps(value, indent=2).replace("\n", "\n  ")
    return f"  {json.dumps(name)}: {text}"


def _read_json(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cost profile {path} cannot be read ({error.strerror or error}); give {_READABLE}."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text; a cost profile is {_READABLE}.") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if FORMAT in text:
            raise ProfileMismatch(f"{path} is damaged: not whole JSON ({error})") from error
        raise ConfigError(
            f"{path} is not JSON ({error}); a cost profile is {_READABLE}."
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        keys = ", ".join(repr(key) for key in list(value)[:5])
        return f"an object with the keys {keys}" if keys else "an empty object"
    if isinstance(value, list):
        return f"a list of {len(value)}, not all of them with 'case' and 'median_us'"
    return f"a {type(value).__name__}"


def _read_additive(value: Mapping[str, Any], source: str) -> CostProfile:
    """Read T = bias + alpha(N) + theta(N + B): rows beside bias + theta, and alpha as a line."""
    requests, alpha = _read_seconds(value, "bs_probes", "alpha_seconds")
    rows, theta = _read_seconds(value, "m_probes", "theta_seconds")
    slope, constant = 0.0, float(alpha[0])
    if len(requests) > 1:
        slope, constant = np.polyfit(requests, alpha, 1).tolist()
    ms = 1000.0 * (float(value["bias_seconds"]) + constant + theta)
    return _build_foreign(rows, ms, 1000.0 * max(0.0, slope), source)


def _read_rates(value: Mapping[str, Any], source: str) -> CostProfile:
    """Read steps per second by rows."""
    rows, rates = _read_seconds(value, *_RATES)
    if (rates <= 0).any():
        raise ValueError(f"sample_steps_per_sec must be above 0, got {rates.tolist()}")
    return _build_foreign(rows, 1000.0 / rates, 0.0, source)


def _read_seconds(value: Mapping[str, Any], *names: str) -> tuple[np.ndarray, np.ndarray]:
    sizes, numbers = (np.asarray(value[name], dtype=np.float64) for name in names)
    if sizes.ndim != 1 or sizes.shape != numbers.shape or not len(sizes):
        raise ValueError(f"{names[0]} and {names[1]} must be lists of one length, and not empty")
    return sizes, numbers


def _build_foreign(rows: np.ndarray, ms: np.ndarray, request_ms: float, source: str) -> CostProfile:
    """Build a profile of a table without drafting, context or sampling terms of its own."""
    if rows[0] > 1:
        # Below its first size such a table is flat.
        rows, ms = np.insert(rows, 0, 1.0), np.insert(ms, 0, ms[0])
    return CostProfile(
        verify_rows=rows,
        verify_ms=np.maximum(ms, 0.0),
        request_ms=request_ms,
        kv_token_ms=0.0,
        sampled_row_ms=0.0,
        filtered_row_ms=0.0,
        draft_requests=np.zeros(0),
        draft_first_ms=np.zeros(0),
        draft_next_ms=np.zeros(0),
        key={},
        source=source,
    )


def _is_timed_shapes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and {"case", "median_us"} <= item.keys() for item in value)
    )
