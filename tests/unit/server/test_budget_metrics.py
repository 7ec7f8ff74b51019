"""What /metrics, /server_info and the stats line say about the budget."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forerun.budget.confidence.calibration import CalibrationStats
from forerun.engine.messages import StepMessage, StepStats
from forerun.server.budget_metrics import BudgetMetrics
from forerun.server.prometheus import StatsLine


def make() -> tuple[BudgetMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    return BudgetMetrics(registry, {"model_name": "m"}), registry


def read(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    """Return samples by (name, reason or bin)."""
    text = generate_latest(registry).decode()
    return {
        (sample.name, sample.labels.get("reason", sample.labels.get("bin", ""))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_exactly_the_reason_that_holds_is_shown() -> None:
    metrics, registry = make()
    name = "forerun:adaptive_active"
    metrics.observe(StepStats(budget_state="active"))
    assert read(registry)[name, "active"] == 1
    metrics.observe(StepStats(budget_state="drafting_does_not_pay"))
    samples = read(registry)
    assert samples[name, "active"] == 0
    assert samples[name, "drafting_does_not_pay"] == 0
    assert metrics.describe() == {
        "adaptive_active": False,
        "budget_state": "drafting_does_not_pay",
    }
    metrics.observe(StepStats(budget_state="active"))
    assert read(registry)[name, "active"] == 1
    assert metrics.describe()["adaptive_active"] is True


def test_predicted_and_drafting_times_add_up() -> None:
    metrics, registry = make()
    for _ in range(3):
        metrics.observe(StepStats(predicted_step_s=0.5, draft_s=0.25, num_drafting=4, num_probes=1))
    samples = read(registry)
    assert samples["forerun:predicted_step_seconds_total", ""] == 1.5
    assert samples["forerun:draft_seconds_total", ""] == 0.75
    assert samples["forerun:drafting_requests_total", ""] == 12
    assert samples["forerun:probes_total", ""] == 3


def test_calibration_is_shown_by_bin() -> None:
    metrics, registry = make()
    stats = CalibrationStats(2)
    stats.observe(np.array([[0.95, 0.55]]), np.array([2]), np.array([1]))
    metrics.observe(StepStats(calibration=stats.snapshot()))
    samples = read(registry)
    assert samples["forerun:reliability_slots", "0.9"] == 1
    assert samples["forerun:reliability_realised", "0.9"] == 1
    assert samples["forerun:reliability_realised", "0.5"] == 0
    assert abs(samples["forerun:calibration_error", ""] - (0.05 + 0.55) / 2) < 1e-6
    assert samples["forerun:realised_accepted_tokens", ""] == 1
    assert abs(metrics.describe()["calibration_error"] - 0.3) < 1e-6


def test_the_stats_line_says_what_was_verified_and_why_not() -> None:
    line = StatsLine()
    stats = StepStats(
        num_rows=4,
        num_spec_steps=1,
        num_draft_tokens=7,
        num_verified_tokens=3,
        num_accepted_tokens=2,
        budget_state="drafting_does_not_pay",
    )
    line.on_step(StepMessage(outputs=[], stats=stats))
    text = line.take(10.0)
    assert text is not None
    assert "drafted 7, verified 3, accepted 2" in text
    assert text.endswith("drafting does not pay")
