"""`forerun train run` from its command line: summary, log, and mistakes in one sentence."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from forerun.cli import main
from forerun.commands.train.run import LOG_FILE, describe, signals_to
from forerun.training.objective.meter import Measurement
from forerun.training.trainer import TrainReport
from training_data import make_target, write_data

SMALL = ["--num-layers=1", "--block-size=3", "--draft-vocab-size=40", "--markov-rank=4"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train-run")
    return write_data(folder / "data", make_target(folder / "target"))


def run(*args: object) -> int:
    return main(["train", "run", "--device", "cpu", *SMALL, *map(str, args)])


def test_a_run_writes_a_drafter_a_log_and_a_summary(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "drafter"
    code = run("--data", data, "--output", output, "--steps", 25, "--heldout-frac", 0.2)
    assert code == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["steps"] == 25
    assert len(summary["heldout"]["acceptance"]) == 3
    assert {"config.json", "model.safetensors", "checkpoints", LOG_FILE} == {
        path.name for path in output.iterdir()
    }
    records = [json.loads(line) for line in (output / LOG_FILE).read_text().splitlines()]
    assert [(r["kind"], r["num_done"]) for r in records] == [
        ("heldout", 0),
        ("train", 25),
        ("heldout", 25),
    ]
    assert records[1]["tokens_per_s"] > 0
    assert records[2]["soft"] < records[0]["soft"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--data", "nowhere"], "nowhere holds no training data"),
        (["--data", "nowhere", "--steps", "0"], "steps must be at least 1"),
        (["--data", "nowhere", "--recipe", "dsprak"], "did you mean 'dspark'"),
        (["--data", "nowhere", "--device", "abacus"], "--device abacus cannot be used"),
        (["--data", "nowhere", "--stepz", "3"], "did you mean '--steps'"),
    ],
)
def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run(*args, "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_signal_asks_to_stop_and_a_second_one_ends_as_usual() -> None:
    asked: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with signals_to(lambda: asked.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert asked == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_a_report_is_one_line_with_the_time_left() -> None:
    measured = Measurement(
        loss=1.25,
        hard=4.0,
        soft=3.5,
        l1=0.8,
        confidence=0.5,
        acceptance=(0.61, 0.5),
        greedy_match=None,
        acceptance_length=1.92,
        num_blocks=7,
    )
    report = TrainReport(
        kind="train",
        num_done=50,
        num_steps=100,
        measured=measured,
        learning_rate=1e-3,
        tokens_per_s=1234.4,
        train_s=100.0,
        left_s=125.0,
    )
    assert describe(report) == (
        "train 50/100: loss 1.250 (hard 4.00, soft 3.50, L1 0.800, confidence 0.500), accepted "
        "0.61 0.50, length 1.92; 1234 tok/s, 2:05 left"
    )
