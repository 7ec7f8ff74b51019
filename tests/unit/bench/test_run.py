"""A run from configuration to files, and what an interrupt leaves behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.options import BenchConfig
from forerun.bench.records import read_records
from forerun.bench.run import Watcher, measure
from forerun.errors import ConfigError
from unit.bench.stub_server import StubServer


def make_watcher(on_finished: Callable[[int, int], None] = lambda _done, _total: None) -> Watcher:
    return Watcher(note=lambda _text: None, on_finished=on_finished)


def make_config(server: StubServer, **options: Any) -> BenchConfig:
    return BenchConfig(base_url=server.base_url, max_concurrency=2, **options)


def test_a_run_writes_its_result_and_its_records(tmp_path: Path) -> None:
    with StubServer() as server:
        config = make_config(server, num_prompts=6, save_result=True, result_dir=str(tmp_path))
        outcome = measure(config, make_watcher(), {"arm": "a"})
    result_path, records_path = outcome.paths
    stored = json.loads(result_path.read_text())
    assert stored == json.loads(json.dumps(outcome.result))
    assert (stored["completed"], stored["total_output_tokens"], stored["sd_arm"]) == (6, 12, "a")
    assert read_records(records_path) == outcome.records
    assert records_path.name == result_path.name.replace(".json", ".records.jsonl")
    assert stored["sd_provenance"]["num_cpus"] >= 1
    # One probe, then each row once, in the order of the workload.
    assert len(server.bodies) == 7


def test_warm_ups_are_sent_and_not_counted() -> None:
    with StubServer(can_reset=True) as server:
        config = make_config(server, num_prompts=2, num_warmups=3, reset_prefix_cache=True)
        outcome = measure(config, make_watcher())
    first_words = [body["messages"][0]["content"][:3] for body in server.bodies[1:4]]
    assert sorted(first_words) == ["(0)", "(1)", "(2)"]
    assert outcome.result["completed"] == 2
    assert outcome.result["sd_prefix_cache_reset"] is True
    # The cache is reset after the warm-up and before the load.
    assert server.paths.index("/reset_prefix_cache") == 4


@pytest.mark.parametrize(
    ("told", "kept"),
    [(b'{"quantization": "int8"}', {"quantization": "int8"}), (None, None), (b"no JSON", None)],
)
def test_the_result_says_what_the_server_said_of_itself(
    told: bytes | None, kept: dict[str, str] | None
) -> None:
    with StubServer(server_info=told) as server:
        outcome = measure(make_config(server, num_prompts=1), make_watcher())
    assert outcome.result["sd_server_info"] == kept


def test_an_interrupt_keeps_what_had_finished(tmp_path: Path) -> None:
    def interrupt(done: int, _total: int) -> None:
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    with StubServer() as server:
        config = make_config(server, save_result=True, result_dir=str(tmp_path))
        outcome = measure(config, make_watcher(interrupt))
    assert outcome.is_interrupted
    assert 3 <= outcome.result["completed"] < 20
    assert read_records(outcome.paths[1]) == outcome.records
    assert outcome.result["sd_gates"]["not_interrupted"].startswith("interrupted after ")


def test_a_server_that_fails_midway_is_reported_in_full() -> None:
    with StubServer(fails_after=3) as server:
        outcome = measure(make_config(server, num_prompts=5), make_watcher())
    assert (outcome.result["completed"], outcome.result["failed"]) == (2, 3)
    assert "HTTP 500: out of order" in outcome.result["sd_gates"]["all_completed"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with StubServer() as server:
        config = make_config(server, save_result=True, result_dir=str(tmp_path / "file" / "x"))
        with pytest.raises(ConfigError, match="choose another --result-dir"):
            measure(config, make_watcher())
