"""Small statistics that keep "unknown" apart from zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


def summarise_ms(
    name: str, values_s: Sequence[float], percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Return mean, median, deviation and percentiles of a series, in milliseconds.

    Keys are vLLM's (`mean_ttft_ms`); our own put the name first (`sd_itl_token_mean_ms`).
    """
    pattern = "{name}_{statistic}_ms" if name.startswith("sd_") else "{statistic}_{name}_ms"
    values = (np.asarray(values_s, dtype=float) * 1000).tolist()
    statistics = {
        "mean": float(np.mean(values)) if values else None,
        "median": compute_percentile(values, 50),
        "std": float(np.std(values)) if values else None,
        **{f"p{percent:g}": compute_percentile(values, percent) for percent in percentiles},
    }
    return {
        pattern.format(name=name, statistic=statistic): value
        for statistic, value in statistics.items()
    }


def compute_percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the linearly interpolated percentile, or None of nothing."""
    return float(np.percentile(values, percent)) if values else None


def keep_known(values: Iterable[float | None]) -> list[float]:
    """Drop what is unknown."""
    return [value for value in values if value is not None]


def add_known(values: Iterable[int | None]) -> int | None:
    """Return the sum, or None if any part is unknown."""
    parts = list(values)
    known = [value for value in parts if value is not None]
    return sum(known) if len(known) == len(parts) else None


def divide(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio, or None where it has no meaning."""
    return numerator / denominator if numerator is not None and denominator else None
