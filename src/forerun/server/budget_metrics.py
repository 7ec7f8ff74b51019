"""Metrics of the budget policy: is it on and why, what it predicted, how true confidences are.

`forerun:adaptive_active{reason}` has one series per reason seen; the one that holds is 1 if
verification adapts and drafting goes on, all others are 0 (so `max()` answers "is it on", and the
label with the latest change says why not). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from forerun.budget.confidence.calibration import CalibrationSnapshot
from forerun.budget.controller import ACTIVE
from forerun.engine.messages import StepStats

_COUNTERS: tuple[tuple[str, str, Callable[[StepStats], float]], ...] = (
    (
        "forerun:predicted_step_seconds",
        "What the cost model expected of all steps; compare with forerun:step_seconds_sum.",
        lambda stats: stats.predicted_step_s,
    ),
    ("forerun:draft_seconds", "Drafting, within steps.", lambda stats: stats.draft_s),
    (
        "forerun:drafting_requests",
        "Requests asked to draft, summed over steps.",
        lambda stats: stats.num_drafting,
    ),
    (
        "forerun:probes",
        "Requests that drafted to find out whether drafting pays again.",
        lambda stats: stats.num_probes,
    ),
)


class BudgetMetrics:
    """Metrics fed by every step's stats. Runs on the event loop."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        names = list(labels)
        self._counters = [
            (Counter(name, text, names, registry=registry).labels(**labels), read)
            for name, text, read in _COUNTERS
        ]
        self._active = Gauge(
            "forerun:adaptive_active",
            "Whether adaptive verification is on, by reason.",
            [*names, "reason"],
            registry=registry,
        )
        self._error = Gauge(
            "forerun:calibration_error",
            "Expected calibration error of prefix survival since the start, 0..1.",
            names,
            registry=registry,
        )
        self._tokens = {
            kind: Gauge(
                f"forerun:{kind}_accepted_tokens",
                f"Accepted tokens of verified drafts, {kind}.",
                names,
                registry=registry,
            )
            for kind in ("predicted", "realised")
        }
        self._bins = {
            kind: Gauge(
                f"forerun:reliability_{kind}",
                f"{kind.capitalize()} of verified draft slots by bin of predicted survival.",
                [*names, "bin"],
                registry=registry,
            )
            for kind in ("slots", "predicted", "realised")
        }
        self._state = ""
        self._calibration: CalibrationSnapshot | None = None

    def observe(self, stats: StepStats) -> None:
        """Take in one step."""
        for counter, read in self._counters:
            counter.inc(read(stats))
        if stats.budget_state and stats.budget_state != self._state:
            self._show_state(stats.budget_state)
        if stats.calibration is not None:
            self._show_calibration(stats.calibration)

    def describe(self) -> dict[str, Any]:
        """Return the live facts for /server_info; empty before the first step."""
        facts: dict[str, Any] = {}
        if self._state:
            facts["adaptive_active"] = self._state == ACTIVE
            facts["budget_state"] = self._state
        if self._calibration is not None:
            facts["calibration_error"] = self._calibration.ece
        return facts

    def _show_state(self, state: str) -> None:
        if self._state:
            self._active.labels(**self._labels, reason=self._state).set(0)
        self._active.labels(**self._labels, reason=state).set(int(state == ACTIVE))
        self._state = state

    def _show_calibration(self, snapshot: CalibrationSnapshot) -> None:
        self._calibration = snapshot
        if snapshot.ece is not None:
            self._error.labels(**self._labels).set(snapshot.ece)
        self._tokens["predicted"].labels(**self._labels).set(snapshot.predicted_accepted)
        self._tokens["realised"].labels(**self._labels).set(snapshot.realised_accepted)
        sums = {
            "slots": snapshot.bin_counts,
            "predicted": snapshot.bin_predicted,
            "realised": snapshot.bin_realised,
        }
        for kind, values in sums.items():
            for index, value in enumerate(values):
                place = f"{index / len(values):.1f}"
                self._bins[kind].labels(**self._labels, bin=place).set(value)
