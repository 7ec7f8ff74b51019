"""Plans and comparisons: order, pairing, ratios and their intervals."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from forerun.bench.options import BenchConfig
from forerun.bench.paired.compare import PairedRun, compare_runs, compute_ratio_interval
from forerun.bench.paired.plan import (
    Arm,
    LoadPoint,
    PairedPlan,
    order_arms,
    order_loads,
    parse_arm,
    parse_loads,
)
from forerun.errors import ConfigError

A, B, C = (Arm(name=name, base_url="http://x") for name in "abc")


def make_plan(**options: Any) -> PairedPlan:
    fields = {"arms": [A, B], "loads": [LoadPoint(max_concurrency=4)], "num_blocks": 2}
    fields |= {"bench": BenchConfig(seed=10), "result_dir": Path()}
    return PairedPlan(**{**fields, **options})


def test_arms_rotate_and_turn_round() -> None:
    names = ["".join(arm.name for arm in order_arms([A, B, C], block)) for block in range(7)]
    assert names == ["abc", "bca", "cab", "cba", "acb", "bac", "abc"]


def test_every_arm_goes_through_the_loads_in_the_same_order() -> None:
    loads = parse_loads("1,2,3,4,5,6")
    orders = [order_loads(loads, 0, block) for block in range(4)]
    assert orders == [order_loads(loads, 0, block) for block in range(4)]
    assert len({tuple(load.name for load in order) for order in orders}) > 1
    assert all(sorted(order, key=loads.index) == loads for order in orders)


def test_a_cell_depends_on_load_and_block_alone() -> None:
    plan = make_plan()
    first = plan.build_config(plan.loads[0], 1, "http://a")
    assert (first.seed, first.max_concurrency, first.num_prompts) == (11, 4, 40)
    assert (first.num_warmups, first.reset_prefix_cache) == (4, True)
    open_loop = plan.build_config(LoadPoint(request_rate=2.5), 0, "http://a")
    assert (open_loop.max_concurrency, open_loop.request_rate) == (None, 2.5)
    assert (open_loop.num_prompts, open_loop.num_warmups) == (None, 4)


def test_loads_are_places_or_rates() -> None:
    assert [load.name for load in parse_loads("1, 16,2.5rps")] == ["1", "16", "2.5rps"]
    for text in ("", "0", "x", "0rps", "infrps", "nanrps", "1,,2"):
        with pytest.raises(ConfigError, match="a load is a number"):
            parse_loads(text)


def test_arms_are_commands_or_addresses() -> None:
    command = """forerun serve --port {port} --speculative-config '{"method": "none"}'"""
    assert parse_arm(f"none={command}") == Arm(name="none", command=command)
    assert parse_arm("up=http://h:1") == Arm(name="up", base_url="http://h:1")
    for text in ("serve", "=x {port}", "a b=x {port}", "a="):
        with pytest.raises(ConfigError, match="is not NAME=COMMAND"):
            parse_arm(text)
    with pytest.raises(ConfigError, match=r"must contain \{port\}"):
        parse_arm("a=serve --port 8000")


def test_a_plan_needs_two_arms_and_a_block() -> None:
    for arms in ([A], [A, A]):
        with pytest.raises(ConfigError, match="two arms with different names"):
            make_plan(arms=arms)
    with pytest.raises(ConfigError, match="--blocks"):
        make_plan(num_blocks=0)


def make_run(arm: str, block: int, value: float, error: str | None = None) -> PairedRun:
    values = {"output_throughput": value}
    return PairedRun(arm=arm, load="4", block=block, order=0, error=error, values=values)


def test_ratios_are_taken_within_blocks() -> None:
    runs = [make_run("a", 0, 100), make_run("b", 0, 110), make_run("b", 1, 60)]
    runs += [make_run("a", 1, 50), make_run("a", 2, 200), make_run("b", 2, 200)]
    (entry,) = compare_runs(runs, ["a", "b"])
    assert entry["ratios"] == pytest.approx([1.1, 1.2, 1.0])
    assert (entry["ratio_median"], entry["ratio_min"]) == pytest.approx((1.1, 1.0))
    assert (entry["baseline_median"], entry["arm_median"]) == (100, 110)
    assert (entry["metric"], entry["arm"], entry["load"]) == ("output_throughput", "b", "4")


def test_a_block_with_a_failure_decides_nothing() -> None:
    runs = [make_run("a", 0, 100), make_run("b", 0, 150), make_run("a", 1, 100)]
    runs += [make_run("b", 1, 900, error="3 of 9 requests failed")]
    (entry,) = compare_runs(runs, ["a", "b"])
    assert entry["ratios"] == [1.5]
    assert (entry["ratio_low"], entry["ratio_high"]) == (None, None)
    assert compare_runs(runs[2:], ["a", "b"]) == []


def test_the_interval_is_students_on_the_logarithms() -> None:
    ratios = [1.02, 0.99, 1.05, 1.01]
    logs = [math.log(ratio) for ratio in ratios]
    expected = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    assert compute_ratio_interval(ratios) == pytest.approx([math.exp(x) for x in expected])
