"""Whether confidences are true: temperatures that make them so, and figures that say how far off.

`ConfidenceTemperatures` come with a drafter's checkpoint, one per position and verifier (DSpark
section 3.2.1: the verifiers accept at different rates), with offsets if it has any.
`CalibrationStats` compares, while serving, the survival that was predicted with what verification
found.

Shapes: R requests, k draft positions, n predictions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import ConfigError, describe_unknown_key

TEMPERATURES_FILE = "confidence_temperatures.json"
VERIFIERS = ("greedy", "standard", "coupled")
PROVENANCE_KEYS = ("dataset", "num_samples", "ece_before", "ece_after")
NUM_BINS = 10


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfidenceTemperatures:
    """One temperature per verifier (rows: greedy, standard, coupled) and draft position.

    `offsets` are added to the tempered log-odds.
    """

    values: np.ndarray  # [3, k] float32
    offsets: np.ndarray  # [3, k] float32
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path, num_positions: int) -> ConfidenceTemperatures | None:
        """Read a checkpoint's file for a drafter of so many positions; None if it has none."""
        path = folder / TEMPERATURES_FILE
        if not path.exists():
            return None
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error}). Calibrate again.") from None
        if not isinstance(given, dict):
            raise ConfigError(f"{path}: must be an object with the keys {', '.join(VERIFIERS)}.")
        return cls.from_mapping(given, num_positions, source=str(path))

    @classmethod
    def from_mapping(
        cls, given: Mapping[str, Any], num_positions: int, *, source: str
    ) -> ConfidenceTemperatures:
        """Check the content of a file; a verifier that is not in it keeps its confidences.

        Of a file for more positions the first ones count: blocks are drafted shorter as well where
        the policy asks for less.
        """
        allowed = (*VERIFIERS, *PROVENANCE_KEYS, "offsets", "num_positions")
        for key in given:
            if key not in allowed:
                raise ConfigError(f"{source}: {describe_unknown_key(key, allowed, kind='key')}")
        stated = given.get("num_positions", num_positions)
        if type(stated) is not int or stated < num_positions:
            raise ConfigError(
                f"{source}: made for num_positions {stated!r}, but the drafter runs with "
                f"{num_positions}; set num_speculative_tokens to {stated!r} or calibrate again."
            )
        values = np.ones((len(VERIFIERS), num_positions), dtype=np.float32)
        offsets = np.zeros_like(values)
        moved = _check_offsets(given.get("offsets", {}), f"{source}: offsets")
        for row, verifier in enumerate(VERIFIERS):
            if verifier in given:
                name = f"{source}: {verifier}"
                values[row] = _check_numbers(given[verifier], stated, name)[:num_positions]
            if verifier in moved:
                name = f"{source}: offsets of {verifier}"
                own = _check_numbers(moved[verifier], stated, name, kind="offset")
                offsets[row] = own[:num_positions]
        provenance = {key: given[key] for key in PROVENANCE_KEYS if key in given}
        return cls(values=values, offsets=offsets, provenance=provenance)

    def apply(
        self,
        confidence: np.ndarray,  # [R, k]
        verifiers: np.ndarray,  # [R] 0 greedy, 1 sampled standard, 2 coupled
    ) -> np.ndarray:
        """Return sigmoid(logit(c) / T + offset) [R, k] float32.

        0 and 1 stay; NaN stays for who reports.
        """
        confidence = np.asarray(confidence, dtype=np.float32)
        num_positions = confidence.shape[1]
        temperatures = self.values[verifiers, :num_positions]
        offsets = self.offsets[verifiers, :num_positions]
        with np.errstate(divide="ignore", over="ignore"):
            against = (np.log1p(-confidence) - np.log(confidence)) / temperatures - offsets
            odds_against = np.exp(against)
        tempered: np.ndarray = 1.0 / (1.0 + odds_against)
        return tempered


def _check_offsets(given: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{name} must be an object with the keys {', '.join(VERIFIERS)}.")
    for key in given:
        if key not in VERIFIERS:
            raise ConfigError(f"{name}: {describe_unknown_key(key, VERIFIERS, kind='key')}")
    return given


def _check_numbers(
    given: Any, num_positions: int, name: str, *, kind: str = "temperature"
) -> Sequence[float]:
    if not isinstance(given, list):
        raise ConfigError(f"{name} must be a list of {num_positions} numbers, got {given!r}.")
    if len(given) != num_positions:
        raise ConfigError(
            f"{name} has {len(given)} {kind}s, but the drafter runs with {num_positions} "
            f"positions; set num_speculative_tokens to {len(given)} or calibrate again."
        )
    is_temperature = kind == "temperature"
    for position, value in enumerate(given):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or (is_temperature and value <= 0):
            wanted = "a positive number" if is_temperature else "a number"
            raise ConfigError(f"{name}: {kind} {position} must be {wanted}, got {value!r}.")
    return given


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CalibrationSnapshot:
    """Sums over every draft slot given to verification. The difference of two is a period.

    Survival of position j is the chance that drafts 0..j are all accepted. Bins are of equal width
    in predicted survival. The sums over positions are predicted and realised accepted tokens.
    """

    bin_counts: np.ndarray  # [NUM_BINS] int64
    bin_predicted: np.ndarray  # [NUM_BINS]
    bin_realised: np.ndarray  # [NUM_BINS]
    position_counts: np.ndarray  # [k] int64
    position_predicted: np.ndarray  # [k]
    position_realised: np.ndarray  # [k]
    squared_error: float

    @property
    def num_slots(self) -> int:
        """Draft slots judged."""
        return int(self.bin_counts.sum())

    @property
    def predicted_accepted(self) -> float:
        """Tokens that should have been accepted."""
        return float(self.position_predicted.sum())

    @property
    def realised_accepted(self) -> float:
        """Tokens that were."""
        return float(self.position_realised.sum())

    @property
    def ece(self) -> float | None:
        """Expected calibration error over the bins; None before the first outcome."""
        gap = float(np.abs(self.bin_predicted - self.bin_realised).sum())
        return gap / self.num_slots if self.num_slots else None

    @property
    def brier(self) -> float | None:
        """Mean squared error of survival; None before the first outcome."""
        return self.squared_error / self.num_slots if self.num_slots else None


class CalibrationStats:
    """Live counters of predicted against realised survival. Memory does not grow.

    A slot counts if it was verified (j < num_verified), whatever came of it: a slot behind a
    rejection has survival 0. Trimmed slots never count, not even behind a rejection, where their
    survival is known too: as it stays unknown behind acceptances, they would only ever add zeros.
    """

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        # Slots, sum of predictions, sum of outcomes, by position and bin.
        self._sums = np.zeros((3, num_positions * NUM_BINS))
        self._squared_error = 0.0

    def observe(
        self,
        survival: np.ndarray,  # [R, k] as predicted when the drafts were admitted
        num_verified: np.ndarray,  # [R]
        num_accepted: np.ndarray,  # [R]
    ) -> None:
        """Count the outcome of one step. NaN survival counts as 0."""
        rows, columns = (np.arange(survival.shape[1]) < num_verified[:, None]).nonzero()
        predicted = np.fmax(survival[rows, columns], 0.0)
        realised = columns < num_accepted[rows]
        cells = np.minimum((predicted * NUM_BINS).astype(np.intp), NUM_BINS - 1)
        cells += columns * NUM_BINS
        size = self._sums.shape[1]
        self._sums[0] += np.bincount(cells, minlength=size)
        self._sums[1] += np.bincount(cells, predicted, size)
        self._sums[2] += np.bincount(cells, realised, size)
        error = predicted - realised
        self._squared_error += float(error @ error)

    def snapshot(self) -> CalibrationSnapshot:
        """Return a copy of the counters."""
        table = self._sums.reshape(3, self._num_positions, NUM_BINS)
        bins, positions = table.sum(axis=1), table.sum(axis=2)
        return CalibrationSnapshot(
            bin_counts=bins[0].astype(np.int64),
            bin_predicted=bins[1],
            bin_realised=bins[2],
            position_counts=positions[0].astype(np.int64),
            position_predicted=positions[1],
            position_realised=positions[2],
            squared_error=self._squared_error,
        )


def compute_ece(
    predicted: np.ndarray,  # [n]
    realised: np.ndarray,  # [n] 0 or 1
    num_bins: int = NUM_BINS,
    *,
    equal_mass: bool = True,
) -> float:
    """Return the expected calibration error: mean gap of predicted and realised over bins.

    Bins hold equally many predictions, or are equally wide.
    """
    if len(predicted) == 0:
        raise ValueError("compute_ece needs at least one prediction.")
    order = np.argsort(predicted, kind="stable")
    gaps = (np.asarray(predicted, dtype=np.float64) - realised)[order]
    if equal_mass:
        bins = np.arange(len(gaps)) * num_bins // len(gaps)
    else:
        bins = np.minimum((predicted[order] * num_bins).astype(np.intp), num_bins - 1)
    return float(np.abs(np.bincount(bins, weights=gaps)).sum()) / len(gaps)


def compute_brier(predicted: np.ndarray, realised: np.ndarray) -> float:
    """Return the mean squared error of probabilities [n] against outcomes [n]."""
    if len(predicted) == 0:
        raise ValueError("compute_brier needs at least one prediction.")
    return float(np.mean((np.asarray(predicted, dtype=np.float64) - realised) ** 2))


def compute_auroc(predicted: np.ndarray, realised: np.ndarray) -> float:
    """Return the chance that a random 1 was given more than a random 0; ties count half."""
    ones = np.asarray(realised, dtype=bool)
    num_ones = int(ones.sum())
    num_zeros = len(ones) - num_ones
    if num_ones == 0 or num_zeros == 0:
        raise ValueError(f"compute_auroc needs both outcomes, got {num_ones} of {len(ones)} true.")
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    # Mean rank (from 1) of each group of equal predictions.
    ranks = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(ranks[inverse[ones]].sum())
    return (rank_sum - num_ones * (num_ones + 1) / 2.0) / (num_ones * num_zeros)
