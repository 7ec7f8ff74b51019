"""The accuracy benchmark's statistics on distributions whose figures are known."""

from __future__ import annotations

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

# The benchmark is run from the checkout, where it is a package of its own.
sys.path.append(str(Path(__file__).parents[3]))

from benchmarks.accuracy.__main__ import parse_arguments
from benchmarks.accuracy.arms import ARMS, REFERENCE, Arm, Forwarder
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.measures import Reference, RowMeasures, summarise
from benchmarks.accuracy.outputs import compare_outputs, find_difference
from benchmarks.accuracy.report import (
    build_distribution_table,
    build_notes,
    build_output_table,
    describe_arm,
    describe_outputs,
    judge,
)
from benchmarks.accuracy.text import KINDS, MIN_WINDOW, Window, count_tokens, cut_windows
from rich.console import Console

from forerun.errors import ConfigError
from model_engines import make_model, make_model_engine

P = torch.tensor([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]])
Q = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]])
TARGETS = torch.tensor([0, 2])


def to_logits(probs: Tensor) -> Tensor:
    """Return logits of these probabilities, away from zero."""
    return probs.log() + 3.0


def make_measures(kl: list[float], nll: list[float], same: list[bool]) -> RowMeasures:
    return RowMeasures(
        torch.tensor(kl, dtype=torch.float64),
        torch.tensor(nll, dtype=torch.float64),
        torch.tensor(same),
    )


def test_kl_of_known_distributions_is_that_of_the_formula_and_has_a_direction() -> None:
    measures = Reference(to_logits(P), TARGETS).compare(to_logits(Q))
    first = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    second = 0.9 * math.log(0.9 / 0.8) + 2 * 0.05 * math.log(0.5)
    torch.testing.assert_close(
        measures.kl, torch.tensor([first, second], dtype=torch.float64), atol=1e-6, rtol=1e-6
    )
    reverse = Reference(to_logits(Q), TARGETS).compare(to_logits(P))
    assert abs(float(reverse.kl[1]) - second) > 1e-3


def test_logits_that_differ_by_a_constant_are_the_same_distribution() -> None:
    measures = Reference(to_logits(P), TARGETS).compare(to_logits(P) - 7)
    assert float(measures.kl.abs().max()) < 1e-12
    assert measures.is_same_top.all()


def test_a_tiny_divergence_is_not_lost_in_rounding() -> None:
    logits = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(0))
    other = logits.clone()
    other[0, 7] += 1e-3
    (kl,) = Reference(logits, torch.tensor([0])).compare(other).kl
    p = float(logits.double().softmax(-1)[0, 7])
    step = float(other[0, 7].double() - logits[0, 7].double())
    expected = math.log1p(p * math.expm1(step)) - p * step
    assert float(kl) == pytest.approx(expected, rel=1e-4)


def test_the_token_that_follows_and_the_most_likely_one_are_compared() -> None:
    reference = Reference(to_logits(P), TARGETS)
    own, other = reference.compare_itself(), reference.compare(to_logits(Q))
    assert own.nll.tolist() == pytest.approx([-math.log(0.5), -math.log(0.05)], abs=1e-6)
    assert other.nll.tolist() == pytest.approx([-math.log(0.25), -math.log(0.1)], abs=1e-6)
    assert other.is_same_top.tolist() == [False, True]
    assert own.kl.tolist() == [0, 0]
    assert own.is_same_top.all()


def test_a_summary_pools_tokens() -> None:
    reference = make_measures([0] * 4, [1.0, 1.0, 2.0, 2.0], [True] * 4)
    measures = make_measures([0.0, 0.1, 0.2, 0.3], [1.0, 1.1, 2.0, 2.1], [True, True, True, False])
    figures = summarise(measures, reference)
    assert figures == {
        "num_tokens": 4,
        "kl_mean": pytest.approx(0.15),
        "kl_p99": pytest.approx(0.3 - 0.03 * 0.1),
        "same_top_share": 0.75,
        "perplexity": pytest.approx(math.exp(1.55)),
        "perplexity_change_percent": pytest.approx(100 * (math.exp(0.05) - 1)),
    }


def test_a_uniform_distribution_has_the_perplexity_of_its_size() -> None:
    own = Reference(torch.zeros(3, 40), torch.tensor([0, 5, 39])).compare_itself()
    assert summarise(own, own)["perplexity"] == pytest.approx(40)


def test_kinds_of_text_count_by_their_tokens_not_alike() -> None:
    reference = {
        "prose": make_measures([0] * 3, [1.0] * 3, [True] * 3),
        "code": make_measures([0], [3.0], [True]),
    }
    measures = {
        "prose": make_measures([0.1] * 3, [1.0] * 3, [True] * 3),
        "code": make_measures([0.5], [3.4], [False]),
    }
    figures = describe_arm(ARMS["exact"], measures, reference)
    assert figures["all"]["kl_mean"] == pytest.approx(0.2)
    assert figures["all"]["same_top_share"] == 0.75
    assert figures["all"]["perplexity"] == pytest.approx(math.exp(1.6))
    assert figures["kinds"]["code"]["kl_mean"] == 0.5
    assert figures["bounds"] == {}


@pytest.mark.parametrize(
    ("kl", "change", "met"),
    [
        (0.005, -0.5, (True, True)),
        (0.0051, 0.5, (False, True)),
        (0.001, -0.51, (True, False)),
        (math.nan, math.nan, (False, False)),
    ],
)
def test_bounds_hold_for_both_directions_and_not_for_nan(
    kl: float, change: float, met: tuple[bool, bool]
) -> None:
    verdict = judge(ARMS["int8"], {"kl_mean": kl, "perplexity_change_percent": change})
    assert tuple(entry["is_met"] for entry in verdict.values()) == met


def test_windows_are_neighbours_and_a_short_rest_is_left_out() -> None:
    token_ids = list(range(100 + MIN_WINDOW))
    assert cut_windows(token_ids, 50) == [token_ids[:50], token_ids[50:100], token_ids[100:]]
    assert cut_windows(token_ids[:-1], 50) == [token_ids[:50], token_ids[50:100]]
    windows = [Window("prose", [1, 2, 3]), Window("prose", [4, 5]), Window("chat", [6, 7])]
    assert count_tokens(windows) == {"prose": 3, "code": 0, "maths": 0, "chat": 1}


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_the_first_difference_of_two_outputs(
    one: list[int], other: list[int], place: int | None
) -> None:
    assert find_difference(one, other) == place
    assert find_difference(other, one) == place


def test_the_mean_place_of_differences_leaves_out_equal_outputs() -> None:
    ours = [[1, 2, 3], [1, 2, 3], [9, 2, 3], [1]]
    figures = compare_outputs(ours, [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1]])
    assert figures == {
        "num_outputs": 4,
        "num_different": 2,
        "different_share": 0.5,
        "first_difference_mean": 1.0,
    }
    assert compare_outputs(ours, ours)["first_difference_mean"] is None


def test_outputs_are_compared_with_the_reference_and_with_exact_bfloat16() -> None:
    answers = {"fp32": [[1, 2]], "exact": [[1, 3]], "int8": [[1, 3]]}
    outputs = describe_outputs(answers)
    assert list(outputs) == ["exact", "int8"]
    assert list(outputs["exact"]) == ["fp32"]
    assert outputs["int8"]["fp32"]["num_different"] == 1
    assert outputs["int8"]["exact"]["num_different"] == 0


def make_llm(seed: int) -> Any:
    """Return what the benchmark needs of an LLM: an engine with a random tiny model."""
    return SimpleNamespace(
        engine=make_model_engine(make_model(seed=seed), speculative_config={"method": "none"})
    )


def test_a_window_gives_the_same_states_in_steps_of_any_size() -> None:
    llm = make_llm(seed=0)
    token_ids = [(7 * i) % 90 + 1 for i in range(41)]
    whole = Forwarder(llm, 64).forward(token_ids)
    for rows_per_step in (1, 8, 40):
        torch.testing.assert_close(Forwarder(llm, rows_per_step).forward(token_ids), whole)
    assert Forwarder(llm, 8).compute_logits(whole[:3]).shape == (3, 257)


def test_arms_read_in_lockstep_compare_every_row_but_the_last() -> None:
    engines = {REFERENCE.name: make_llm(0), "same": make_llm(0), "other": make_llm(1)}
    comparison = Comparison(engines, rows_per_step=16)
    windows = [Window(kind, [(n * i) % 90 + 1 for i in range(70)]) for n, kind in enumerate(KINDS)]
    for window in windows:
        comparison.read(window)
    measures = comparison.join()
    assert {len(rows.kl) for kinds in measures.values() for rows in kinds.values()} == {69}
    assert all(float(rows.kl.abs().max()) < 1e-9 for rows in measures["same"].values())
    assert all(float(rows.kl.mean()) > 0.1 for rows in measures["other"].values())


def test_tables_show_misses_and_arms_that_failed() -> None:
    reference = {"prose": make_measures([0], [1.0], [True])}
    bad = {"prose": make_measures([0.2], [1.1], [False])}
    arms: dict[str, Any] = {
        "fp32": describe_arm(Arm(name="fp32"), reference, reference),
        "int8": describe_arm(ARMS["int8"], bad, reference),
        "q8_0": {"error": "no native kernels"},
    }
    outputs = describe_outputs({"fp32": [[1]], "int8": [[2]]})
    result = {"model": "m", "num_tokens": 1, "text": {"prose": 1}, "arms": arms, "num_prompts": 1}
    result |= {"max_tokens": 1, "outputs": outputs}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(build_distribution_table(result), build_output_table(result))
    text = console.export_text()
    assert "KL <= 0.005 MISS, change <= 0.5 % MISS" in text
    assert "failed" in text
    assert "1 of 1 (100 %)" in text
    assert build_notes(result) == ["q8_0 failed: no native kernels"]
    json.dumps(result)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "int9"], "did you mean 'int8'"),
        (["--window", "3"], "--window must be at least 32"),
        (["--rows-per-step", "0"], "--rows-per-step must be at least 1"),
    ],
)
def test_a_wrong_command_line_says_what_is_allowed(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(arguments)
