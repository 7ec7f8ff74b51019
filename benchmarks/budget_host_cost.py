"""What the adaptive policy costs the host: each call the step loop makes, for batches of all sizes.

The calls are timed one by one on a BudgetController that lives through real steps of fake requests:
`record` takes in drafts, `choose_budget` decides, `observe` learns from outcomes drawn by the
drafts' own chances, `choose_depths` says who drafts next (every few steps it plans anew, which
is timed apart). Medians in microseconds, and the mean of a whole step, rare calls included. The
last line is JSON. Run it on an idle machine.

    python -m benchmarks.budget_host_cost
    python -m benchmarks.budget_host_cost --cases 1x7,4096x15 --steps 500
    python -m benchmarks.budget_host_cost --cases 1x7 --profile     # where the time goes
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from forerun.budget import build_controller
from forerun.budget.controller import BudgetController
from forerun.budget.costs.model import StepShape
from forerun.budget.costs.profile import CostProfile
from forerun.config import SpeculativeConfig
from forerun.core import Request, SamplingParams
from forerun.engine.allocator import keep_freed_memory
from forerun.plan import RequestDraft

CASES = "1x7,16x7,64x7,256x7,4096x15"
PARTS = ("record", "choose_budget", "observe", "observe_times", "choose_depths", "plan")
WARM_UP_STEPS = 40


class Timer:
    """Times calls by name."""

    def __init__(self) -> None:
        self.samples_us: dict[str, list[float]] = {part: [] for part in PARTS}

    def call(self, part: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return what the function returns; its time counts for this part."""
        started_ns = time.perf_counter_ns()
        result = function(*args)
        self.samples_us[part].append((time.perf_counter_ns() - started_ns) / 1000)
        return result


def make_profile(num_requests: int, depth: int) -> CostProfile:
    """Return costs that are flat for a quarter of the rows there can be, then linear."""
    largest = num_requests * (depth + 1)
    rows = np.unique(np.geomspace(1, largest, 16).astype(np.int64))
    return CostProfile(
        verify_rows=rows,
        verify_ms=3.0 + 9.0 * np.maximum(0.0, rows / largest - 0.25),
        request_ms=0.001,
        kv_token_ms=1e-5,
        sampled_row_ms=0.001,
        filtered_row_ms=0.002,
        draft_requests=np.array([1, max(2, num_requests)]),
        draft_first_ms=np.array([0.01, 0.02]),
        draft_next_ms=np.array([0.0, 0.0]),
        key={},
        source="benchmark",
    )


def make_controller(num_requests: int, depth: int) -> tuple[BudgetController, list[Request]]:
    """Return the controller of the default drafter's engine, and running requests."""
    config = SpeculativeConfig(num_speculative_tokens=depth, enable_adaptive_verification=True)
    profile = make_profile(num_requests, depth)
    controller = build_controller(config, num_slots=num_requests, profile=profile)
    requests = [
        Request(
            request_id=f"r{index}",
            parent_id=f"r{index}",
            params=SamplingParams(),
            token_ids=[0],
            num_prompt_tokens=1,
            seed=index,
        )
        for index in range(num_requests)
    ]
    for request in requests:
        controller.open(request, 0)
    return controller, requests


def draw_drafts(rng: np.random.Generator, num_requests: int, depth: int) -> list[RequestDraft]:
    """Return full drafts whose evidence is the log-odds of their chances."""
    evidence = rng.normal(1.0, 1.5, (num_requests, depth)).tolist()
    tokens = list(range(depth))
    return [RequestDraft(request_id="", token_ids=list(tokens), evidence=row) for row in evidence]


def accept(
    rng: np.random.Generator, drafts: Sequence[RequestDraft], admitted: Sequence[int]
) -> list[int]:
    """Return how many of the admitted drafts are accepted."""
    log_odds = np.array([draft.evidence for draft in drafts])
    is_kept = rng.random(log_odds.shape) < 1.0 / (1.0 + np.exp(-log_odds))
    counts: list[int] = np.minimum(np.cumprod(is_kept, axis=1).sum(axis=1), admitted).tolist()
    return counts


def run_step(
    timer: Timer,
    controller: BudgetController,
    requests: Sequence[Request],
    drafts: Sequence[RequestDraft],
    rng: np.random.Generator,
) -> None:
    """Make the calls of one step of the engine."""
    for request, draft in zip(requests, drafts, strict=True):
        request.draft_token_ids = draft.token_ids
    count = len(requests)
    timer.call("record", controller.record, requests, drafts)
    shape = StepShape(num_rows=count, num_requests=count, num_context_tokens=200 * count)
    admitted = timer.call("choose_budget", controller.choose_budget, requests, shape, count, 10**6)
    accepted = accept(rng, drafts, admitted)
    seen = [index for index in range(count) if admitted[index]]
    timer.call(
        "observe",
        controller.observe,
        [requests[index] for index in seen],
        [admitted[index] for index in seen],
        [accepted[index] for index in seen],
    )
    timer.call("observe_times", controller.observe_times, controller.decision.target_ms, 0.02)
    # A plan is made where the controller's own age says so; it replaces `drafting`.
    before = controller.planner.decision
    depths = timer.call("choose_depths", controller.choose_depths, requests, 200 * count)
    if controller.planner.decision is not before:
        timer.samples_us["plan"].append(timer.samples_us["choose_depths"].pop())
    assert len(depths) == count


def measure(num_requests: int, depth: int, num_steps: int) -> dict[str, float]:
    """Return the median microseconds of every part, and the mean of a whole step."""
    rng = np.random.default_rng(0)
    controller, requests = make_controller(num_requests, depth)
    timer = Timer()
    for step in range(num_steps + WARM_UP_STEPS):
        if step == WARM_UP_STEPS:
            timer = Timer()
        run_step(timer, controller, requests, draw_drafts(rng, num_requests, depth), rng)
    medians = {part: statistics.median(timer.samples_us[part]) for part in PARTS}
    return medians | {"mean_step": sum(map(sum, timer.samples_us.values())) / num_steps}


def print_profile(num_requests: int, depth: int, num_steps: int) -> None:
    """Print the functions that take the most time of their own."""
    profiler = cProfile.Profile()
    profiler.runcall(measure, num_requests, depth, num_steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Measure every case and print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=CASES, help="requests x drafts (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    args = parser.parse_args()
    keep_freed_memory()  # as the engine does
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",")]
    results = {}
    print(f"{'us':>10}" + "".join(f"{part:>15}" for part in (*PARTS, "mean_step")))
    for num_requests, depth in cases:
        name, num_steps = f"{num_requests}x{depth}", args.steps if num_requests < 1000 else 64
        results[name] = measure(num_requests, depth, num_steps)
        print(f"{name:>10}" + "".join(f"{value:15.1f}" for value in results[name].values()))
        if args.profile:
            print_profile(num_requests, depth, num_steps)
    described = {"machine": platform.machine(), "numpy": np.__version__}
    print(json.dumps({"benchmark": "budget_host_cost", **described, "us": results}))


if __name__ == "__main__":
    main()
