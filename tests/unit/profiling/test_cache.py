"""Profiles on disk, the key they are stored under, and which one an engine takes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cost_profiles import make_profile
from forerun.budget.costs.files import format_profile, write_profile
from forerun.budget.costs.profile import CostProfile
from forerun.config import EngineConfig
from forerun.engine.resolve import Resolved
from forerun.errors import ConfigError
from forerun.profiling import source as profile_source
from forerun.profiling.cache import find_profile, locate_profile, save_profile
from forerun.profiling.key import build_profile_key, build_profile_limits, identify_model
from forerun.profiling.measure import MEASURED_BUSY
from forerun.profiling.source import obtain_profile

KEY = {"dtype": "bfloat16", "device": "a CPU"}

Obtain = Callable[..., CostProfile]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    return tmp_path / "cache"


def test_a_stored_profile_is_found_again_under_its_key(cache_folder: Path) -> None:
    path = save_profile(make_profile(key=KEY))
    assert path.parent == cache_folder / "profiles"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    found, where = find_profile(dict(reversed(KEY.items())))
    assert found is not None
    assert found.to_dict() == make_profile(key=KEY).to_dict()
    assert (found.source, where) == (f"cache:{path}", str(path))


def test_another_key_finds_nothing() -> None:
    save_profile(make_profile(key=KEY))
    found, reason = find_profile({**KEY, "dtype": "float32"})
    assert found is None
    assert reason.startswith("none is stored")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "\x00\x01", '{"format": "forerun-cost-profile"}']
)
def test_a_corrupt_file_is_ignored_with_a_reason(content: str) -> None:
    path = save_profile(make_profile(key=KEY))
    path.write_text(content)
    found, reason = find_profile(KEY)
    assert found is None
    assert str(path) in reason


def test_a_file_whose_key_is_another_is_ignored_with_the_difference() -> None:
    path = save_profile(make_profile(key=KEY))
    path.write_text(format_profile(make_profile(key={**KEY, "dtype": "float32"})))
    found, reason = find_profile(KEY)
    assert found is None
    assert "measured for dtype float32, this engine has bfloat16" in reason


def test_a_file_without_a_key_is_not_trusted_in_the_cache() -> None:
    path = save_profile(make_profile(key=KEY))
    path.write_text(format_profile(make_profile(key={})))
    found, reason = find_profile(KEY)
    assert found is None
    assert "does not say what it was measured for" in reason


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[CostProfile]:
    """Replace the measurement; every profile measured is in the list."""
    taken: list[CostProfile] = []

    def measure(runner: Any, *, limits: Any, key: Any, progress: Any) -> CostProfile:
        taken.append(make_profile(key=key))
        return taken[-1]

    monkeypatch.setattr(profile_source, "measure_profile", measure)
    return taken


def obtain(**options: Any) -> CostProfile:
    return obtain_profile(None, KEY, limits=None, **options)  # type: ignore[arg-type]


def test_what_was_measured_once_is_not_measured_again(measured: list[CostProfile]) -> None:
    assert obtain().source == "measured"
    assert obtain().source == f"cache:{locate_profile(KEY)}"
    assert len(measured) == 1
    assert obtain(is_fresh=True).source == "measured"


def test_a_corrupt_cache_is_measured_again_and_mended(
    measured: list[CostProfile], caplog: pytest.LogCaptureFixture
) -> None:
    save_profile(make_profile(key=KEY)).write_text("{")
    with caplog.at_level("INFO", logger="forerun"):
        assert obtain().source == "measured"
    assert "cost profile: measuring it; " in caplog.text
    assert "is not JSON" in caplog.text
    assert obtain().source.startswith("cache:")


def test_a_given_profile_is_taken_as_it_is(measured: list[CostProfile], tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    write_profile(make_profile(key=KEY), path)
    assert obtain(given_path=str(path)).source == f"file:{path}"
    assert measured == []


def test_a_given_profile_for_something_else_is_not_used(
    measured: list[CostProfile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "given.json"
    write_profile(make_profile(key={**KEY, "device": "a GPU"}), path)
    with caplog.at_level("WARNING", logger="forerun"):
        assert obtain(given_path=str(path)).source == "measured"
    assert "measured for device a GPU, this engine has a CPU" in caplog.text


def test_a_given_path_without_a_profile_is_a_mistake(measured: list[CostProfile]) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        obtain(given_path="absent.json")


def test_a_disturbed_measurement_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = make_profile(key=KEY, source=MEASURED_BUSY)
    monkeypatch.setattr(profile_source, "measure_profile", lambda *_, **__: busy)
    assert obtain() is busy
    assert find_profile(KEY)[0] is None


def test_a_folder_that_cannot_be_written_costs_only_the_cache(
    measured: list[CostProfile], cache_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_folder.write_text("a file where the folder should be")
    with caplog.at_level("WARNING", logger="forerun"):
        assert obtain().source == "measured"
    assert "set FORERUN_CACHE" in caplog.text


def make_resolved(**changes: Any) -> Resolved:
    resolved = Resolved(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        max_model_len=512,
        max_num_batched_tokens=256,
        max_prefill_while_decoding=64,
        num_threads=2,
        kv_cache_bytes=2**20,
        num_blocks=33,
    )
    return replace(resolved, **changes)


def make_key(folder: Path, *, resolved: dict[str, Any] | None = None, **options: Any) -> dict:
    model = folder / "model.gguf"
    model.touch()
    os.utime(model, ns=(0, 0))
    config = EngineConfig.from_options(**options)
    return build_profile_key(config, make_resolved(**(resolved or {})), model)


@pytest.mark.parametrize(
    "changes",
    [
        {"resolved": {"dtype": torch.float32}},
        {"resolved": {"kv_dtype": torch.int8}},
        {"resolved": {"num_threads": 1}},
        {"resolved": {"max_num_batched_tokens": 128}},
        {"resolved": {"max_model_len": 256}},
        {"resolved": {"attention_backend": "native"}},
        {"resolved": {"quantization": "int8"}},
        {"quantization": "q8_0"},
        {"max_num_seqs": 8},
        {"kv_block_size": 32},
        {"batch_invariant": True},
        {"speculative_config": {"num_speculative_tokens": 3}},
        {"speculative_config": {"method": "none"}},
        {"speculative_config": {"prompt_lookup_max": 8}},
        {"speculative_config": {"rejection_sample_method": "coupled"}},
    ],
)
def test_what_changes_the_cost_changes_the_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert make_key(tmp_path) == make_key(tmp_path)
    assert make_key(tmp_path, **changes) != make_key(tmp_path)


def test_a_policy_does_not_change_the_key(tmp_path: Path) -> None:
    adaptive = {"method": "ngram", "enable_adaptive_verification": True}
    assert make_key(tmp_path, speculative_config=adaptive) == make_key(
        tmp_path, speculative_config={"method": "ngram"}
    )


def test_a_model_is_known_by_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    first = identify_model(folder)
    assert first.startswith("llama (")
    assert identify_model(folder) == first
    (folder / "model.safetensors").write_text("weights")
    second = identify_model(folder)
    (folder / "model.safetensors").write_text("other weights")
    assert len({first, second, identify_model(folder)}) == 3


def test_the_null_block_is_not_profiled() -> None:
    limits = build_profile_limits(EngineConfig(), make_resolved(), 97)
    assert limits.num_kv_blocks == 32
    assert limits.max_draft_tokens == EngineConfig().speculative.num_speculative_tokens
