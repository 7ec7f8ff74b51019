"""`forerun profile`: a table or JSON on stdout, a file if asked, and where the profile is from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cost_profiles import make_profile
from forerun.budget.costs.files import load_profile
from forerun.cli import main
from forerun.engine import build
from forerun.engine.resolve import Resolved
from forerun.profiling import source as profile_source

RESOLVED = Resolved(
    device=torch.device("cpu"),
    dtype=torch.float32,
    kv_dtype=torch.float32,
    max_model_len=64,
    max_num_batched_tokens=8,
    max_prefill_while_decoding=8,
    num_threads=1,
    kv_cache_bytes=2**20,
    num_blocks=9,
)


@pytest.fixture(autouse=True)
def log_settings() -> Iterator[None]:
    logger = logging.getLogger("forerun")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace loading and measuring; the limits of every measurement are in the list."""
    model = tmp_path / "model.gguf"
    model.touch()
    parts = SimpleNamespace(
        path=model,
        resolved=RESOLVED,
        runner=None,
        model=SimpleNamespace(spec=SimpleNamespace(vocab_size=97)),
    )
    taken: list[Any] = []

    def measure(runner: Any, *, limits: Any, key: Any, progress: Any) -> Any:
        taken.append(limits)
        progress(1, 1)
        return make_profile(key=key)

    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "load_parts", lambda config, progress: parts)
    monkeypatch.setattr(profile_source, "measure_profile", measure)
    return taken


def test_the_table_shows_speed_by_rows_and_the_source(
    measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--max-num-seqs", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cost profile: measured"
    rows = [line.split() for line in lines]
    assert ["8", "6.00", "0.750", "1,333"] in rows
    assert ["4", "2.000", "0.4000"] in rows
    assert measured[0].max_num_seqs == 4
    assert measured[0].num_kv_blocks == 8


def test_a_second_time_comes_from_the_cache_unless_asked_for_fresh(
    measured: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile"]) == 0
    capsys.readouterr()
    assert main(["profile"]) == 0
    assert capsys.readouterr().out.startswith("cost profile: cache:")
    assert main(["profile", "--fresh"]) == 0
    assert capsys.readouterr().out.startswith("cost profile: measured\n")
    assert len(measured) == 2


def test_json_and_file_hold_the_same_profile(
    measured: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    assert main(["profile", "--json", "--output", str(path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.pop("source") == "measured"
    assert shown == load_profile(path).to_dict()
    assert shown["key"]["dtype"] == "float32"


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    measured: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["profile", "--output", str(tmp_path / "no" / "profile.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["profile", "--output", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert measured == []
