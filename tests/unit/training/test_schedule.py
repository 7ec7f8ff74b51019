"""The learning rate, the loss's phases, and options that make no sense."""

from __future__ import annotations

import pytest

from forerun.errors import ConfigError
from forerun.training.schedule import compute_learning_rate, compute_loss_weights
from forerun.training.settings import RECIPES, TrainSettings

SETTINGS = TrainSettings(
    steps=1000, learning_rate=1.0, warmup_frac=0.1, final_rate_frac=0.2, tv_from=0.5, tv_ramp=0.1
)


def test_the_rate_rises_then_falls_to_its_floor() -> None:
    rates = [compute_learning_rate(step, SETTINGS) for step in range(1001)]
    assert rates[0] == pytest.approx(0.01)
    assert rates[49] == pytest.approx(0.5)
    assert max(rates) == pytest.approx(1.0)
    assert rates[550] == pytest.approx(0.6, abs=0.01)
    assert rates[1000] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[100:], rates[101:], strict=False))


def test_soft_cross_entropy_gives_way_to_l1() -> None:
    early, middle, late = (compute_loss_weights(step, SETTINGS) for step in (499, 550, 601))
    assert (early.soft, early.l1) == (1.0, 0.0)
    assert (middle.soft, middle.l1) == pytest.approx((0.5, 0.45))
    assert (late.soft, late.l1) == (0.0, 0.9)
    assert {w.hard for w in (early, middle, late)} == {0.1}
    assert {w.confidence for w in (early, middle, late)} == {1.0}


def test_without_a_ramp_l1_takes_over_at_once() -> None:
    settings = TrainSettings(steps=10, tv_from=0.5, tv_ramp=0.0)
    assert [compute_loss_weights(step, settings).l1 for step in (4, 5)] == [0.0, 0.9]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps must be at least 1"),
        ("learning_rate", 0.0, "learning_rate must be above 0"),
        ("learning_rate", float("nan"), "learning_rate must be above 0"),
        ("averaging", 1.0, "must be below 1"),
        ("heldout_frac", 1.5, "heldout_frac must be in 0..1"),
        ("markov_rank", -1, "markov_rank must be 0 or more"),
        ("markov_head_type", "lstm", "vanilla, gated, rnn"),
        ("init", "zero", "random, target"),
        ("steps", 2.5, "steps must be int"),
    ],
)
def test_bad_options_are_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**{name: value})


def test_recipes_are_settings_and_options_win() -> None:
    for recipe in RECIPES:
        TrainSettings.from_recipe(recipe, {})
    settings = TrainSettings.from_recipe("dflash", {"steps": 7})
    assert (settings.markov_rank, settings.confidence_head, settings.steps) == (0, False, 7)


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dspark'"):
        TrainSettings.from_recipe("dsprak", {})
