"""Whole runs on a tiny target: they learn, resume to the bit, stop where they must."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forerun.drafters.dspark.checkpoint import load_network
from forerun.errors import ConfigError
from forerun.training.checkpoints import find_checkpoint, read_checkpoint
from forerun.training.session import open_session
from forerun.training.settings import TrainSettings
from forerun.training.trainer import CHECKPOINTS, Trainer, TrainReport
from training_data import make_settings, make_target, write_data


class World:
    """A target, its data and an output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = make_target(folder / "target")
        self.data = write_data(folder / "data", self.target)

    def open(
        self, settings: TrainSettings, output: Path, reports: list[TrainReport] | None = None
    ) -> Trainer:
        report = (lambda _: None) if reports is None else reports.append
        return open_session(self.data, output, settings, report)[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def read_last(output: Path) -> dict[str, torch.Tensor]:
    path = find_checkpoint(output / CHECKPOINTS)
    assert path is not None
    return read_checkpoint(path).tensors


def stop_after(trainer: Trainer, num_steps: int) -> None:
    """Ask the trainer to stop once it has done so many steps."""
    take_step = trainer._take_step

    def take_and_count() -> None:
        take_step()
        if trainer.num_done == num_steps:
            trainer.request_stop()

    trainer._take_step = take_and_count  # type: ignore[method-assign]


@pytest.mark.parametrize("init", ["random", "target"])
def test_a_drafter_learns_what_its_target_does(world: World, tmp_path: Path, init: str) -> None:
    """The target is 95 % sure of its next token; an untrained drafter accepts 1 in 10 at most."""
    reports: list[TrainReport] = []
    settings = make_settings(steps=150, learning_rate=5e-3, init=init, averaging=0.9)
    measured = world.open(settings, tmp_path, reports).run()
    assert measured is not None
    assert reports[0].kind == "heldout"
    assert max(reports[0].measured.acceptance) < 0.2
    assert min(measured.acceptance) > 0.8
    assert measured.greedy_match is not None
    assert min(measured.greedy_match) > 0.95
    assert measured.acceptance_length > 4.2


def test_a_resumed_run_ends_in_the_same_bits(world: World, tmp_path: Path) -> None:
    settings = make_settings(steps=9, tv_from=0.4)
    world.open(settings, tmp_path / "whole").run()
    first = world.open(settings, tmp_path / "parts")
    stop_after(first, 4)
    first.run()
    assert first.num_done == 4
    second = world.open(settings, tmp_path / "parts")
    assert second.num_done == 4
    second.run()
    whole, parts = read_last(tmp_path / "whole"), read_last(tmp_path / "parts")
    assert whole.keys() == parts.keys() >= {"values", "average", "exp_avg", "exp_avg_sq", "d2t"}
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name
    assert not torch.equal(whole["values"], whole["average"])


def test_the_drafter_exported_is_the_average(world: World, tmp_path: Path) -> None:
    trainer = world.open(make_settings(steps=5), tmp_path)
    trainer.run()
    exported = load_network(tmp_path)
    params = [p for p in exported.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in params])
    average = read_last(tmp_path)["average"]
    torch.testing.assert_close(flat, average.bfloat16().float())
    facts = json.loads((tmp_path / "config.json").read_text())["forerun_training"]
    assert facts["steps"] == 5
    assert facts["heldout"]["acceptance"]
    # And the run itself goes on from the latest weights, not from the average.
    assert torch.equal(trainer._optimiser.values, read_last(tmp_path)["values"])


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(
    world: World, tmp_path: Path
) -> None:
    trainer = world.open(make_settings(steps=6), tmp_path)
    stop_after(trainer, 3)
    trainer.run()
    good = find_checkpoint(tmp_path / CHECKPOINTS)
    assert good is not None
    content = good.read_bytes()
    again = world.open(make_settings(steps=6), tmp_path)
    again._network.norm.weight.data[0] = float("nan")
    with pytest.raises(ConfigError, match=r"step 4: the loss is nan.*00000003.*last good one"):
        again.run()
    assert find_checkpoint(tmp_path / CHECKPOINTS) == good
    assert good.read_bytes() == content


def test_two_checkpoints_are_kept(world: World, tmp_path: Path) -> None:
    trainer = world.open(make_settings(steps=4, checkpoint_minutes=1e-9), tmp_path)
    trainer.run()
    names = sorted(path.name for path in (tmp_path / CHECKPOINTS).iterdir())
    assert names == [f"checkpoint-{n:08d}.safetensors" for n in (3, 4)]


def test_time_is_up(world: World, tmp_path: Path) -> None:
    trainer = world.open(make_settings(steps=1000, max_minutes=3.0), tmp_path)
    ticks = iter(range(0, 10**6, 60))
    trainer._clock = lambda: float(next(ticks))
    trainer.run()
    assert trainer.num_done == 3


def test_a_run_can_be_prolonged_but_not_become_another_network(
    world: World, tmp_path: Path
) -> None:
    world.open(make_settings(steps=3), tmp_path).run()
    longer = world.open(make_settings(steps=5, learning_rate=1e-4), tmp_path)
    longer.run()
    assert longer.num_done == 5
    with pytest.raises(ConfigError, match="holds a run with markov_rank 8, this one has 4"):
        world.open(make_settings(markov_rank=4), tmp_path)


def test_a_damaged_checkpoint_is_named(world: World, tmp_path: Path) -> None:
    world.open(make_settings(steps=2), tmp_path).run()
    path = find_checkpoint(tmp_path / CHECKPOINTS)
    assert path is not None
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ConfigError, match="00000002.*not a complete checkpoint.*delete it"):
        world.open(make_settings(steps=2), tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_rank": 0, "confidence_head": False},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0},
        {"draft_vocab_size": 97},
        {"heldout_frac": 0.0},
        {"averaging": 0.0},
    ],
    ids=str,
)
def test_every_kind_of_network_trains(
    world: World, tmp_path: Path, changes: dict[str, object]
) -> None:
    trainer = world.open(make_settings(steps=3, **changes), tmp_path)
    before = trainer._optimiser.values.clone()
    trainer.run()
    moved = trainer._optimiser.values != before
    assert moved.float().mean() > 0.5
    method = "dflash" if changes.keys() == {"markov_rank", "confidence_head"} else "dspark"
    assert load_network(tmp_path).config.method == method


def test_another_target_is_refused(world: World, tmp_path: Path) -> None:
    settings, report = make_settings(), lambda _: None
    other = make_target(tmp_path / "wide", hidden_size=64, head_dim=16)
    with pytest.raises(ConfigError, match="hidden_size 48.*has 64"):
        open_session(world.data, tmp_path / "out", settings, report, target=str(other))
    torch.manual_seed(99)
    twin = make_target(tmp_path / "twin", initializer_range=0.2)
    with pytest.raises(ConfigError, match="is not the target the data was made with"):
        open_session(world.data, tmp_path / "out", settings, report, target=str(twin))


def test_settings_of_the_checkpoint_are_those_given(world: World, tmp_path: Path) -> None:
    settings = make_settings(steps=2)
    world.open(settings, tmp_path).run()
    path = find_checkpoint(tmp_path / CHECKPOINTS)
    assert path is not None
    stored = TrainSettings(**read_checkpoint(path).settings)
    assert stored == settings
    assert stored != replace(settings, seed=1)
