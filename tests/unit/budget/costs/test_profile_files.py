"""Files of cost profiles: our own, those of other engines, and what is none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cost_profiles import make_profile
from forerun.budget.costs.files import (
    ProfileMismatch,
    explain_difference,
    format_profile,
    load_profile,
    write_profile,
)
from forerun.errors import ConfigError

KEY = {"dtype": "bfloat16", "device": "a CPU"}


def write_json(folder: Path, value: Any) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(value))
    return path


def time_case(requests: int, rows: int, context: int, drafts: int) -> dict[str, Any]:
    """Return a case timed by a law: 2 ms, 0.1 a row, 0.3 a request, 0.001 a token, 0.2 + 0.05 d."""
    ms = 2.0 + 0.1 * requests * rows + 0.3 * requests + 0.001 * requests * context
    ms += (0.2 + 0.05 * drafts) * requests if drafts else 0.0
    case = f"verify={requests}*{rows}@{context}" + (f":{drafts}" if drafts else "")
    return {"case": case, "requests": requests, "median_us": 1000.0 * ms, "ranks": [0]}


def test_a_written_profile_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = make_profile()
    write_profile(profile, path)
    again = load_profile(path, KEY)
    assert again.to_dict() == profile.to_dict()
    assert again.source == f"file:{path}"
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


def test_each_size_is_on_a_line_with_its_cost() -> None:
    lines = format_profile(make_profile()).splitlines()
    assert '    {"rows": 4, "ms": 4.0},' in lines
    assert '    {"requests": 4, "first_ms": 2.0, "next_ms": 0.4}' in lines


def test_a_profile_for_something_else_names_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(make_profile(), path)
    with pytest.raises(ProfileMismatch, match="dtype bfloat16, this engine has float32$"):
        load_profile(path, {**KEY, "dtype": "float32"})


def test_a_fact_that_only_one_key_has_is_a_difference() -> None:
    assert explain_difference({"a": "1"}, {"a": "1"}) is None
    assert explain_difference({}, {"a": "1"}) == "measured for a (unknown), this engine has 1"
    assert explain_difference({"a": "1"}, {"b": "1"}) is not None
    many = dict.fromkeys("abcde", "1")
    assert explain_difference({}, many).endswith("and 2 more differences")


@pytest.mark.parametrize("length", [60, 400])
def test_a_cut_off_profile_is_damaged(tmp_path: Path, length: int) -> None:
    path = tmp_path / "profile.json"
    path.write_text(format_profile(make_profile())[:length])
    with pytest.raises(ProfileMismatch, match="is damaged: not whole JSON"):
        load_profile(path)


def test_a_profile_with_impossible_costs_is_damaged(tmp_path: Path) -> None:
    value = make_profile().to_dict()
    value["verify"][0]["ms"] = -1.0
    with pytest.raises(ProfileMismatch, match="is damaged: verify_ms must be finite"):
        load_profile(write_json(tmp_path, value))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"output_throughput": 12.0}, "an object with the keys 'output_throughput'"),
        ({}, "an empty object"),
        ([], "a list of 0"),
        ([{"case": "verify=1*1@8"}], "a list of 1, not all of them with 'case' and 'median_us'"),
        (3, "a int"),
    ],
)
def test_something_else_altogether_is_a_mistake(tmp_path: Path, value: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"holds {found}.*forerun profile --output"):
        load_profile(write_json(tmp_path, value))


def test_no_file_and_no_json_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file"):
        load_profile(tmp_path / "absent.json")
    path = tmp_path / "text.json"
    path.write_text("rows,ms\n1,3\n")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is no text"):
        load_profile(path)


def test_timed_shapes_give_back_the_law_they_were_timed_by(tmp_path: Path) -> None:
    shapes = [
        *[(n, 4, 512, d) for n in (1, 4, 16) for d in (0, 1, 3)],
        *[(n, 1, 512, 0) for n in (1, 4, 16)],
        (4, 4, 4096, 0),
    ]
    path = write_json(tmp_path, [time_case(*shape) for shape in shapes])
    profile = load_profile(path, KEY)
    assert profile.kv_token_ms == pytest.approx(0.001)
    assert profile.request_ms == pytest.approx(0.3)
    assert profile.verify_rows.tolist() == [1, 4, 16, 64]
    assert profile.verify_ms == pytest.approx([2.1, 2.4, 3.6, 8.4])
    assert profile.draft_requests.tolist() == [1, 4, 16]
    assert profile.draft_first_ms == pytest.approx([0.25, 1.0, 4.0])
    assert profile.draft_next_ms == pytest.approx([0.05, 0.2, 0.8])


def test_a_drafter_is_told_apart_by_depths_alone(tmp_path: Path) -> None:
    cases = [time_case(1, 4, 512, 2), time_case(1, 4, 512, 6)]
    profile = load_profile(write_json(tmp_path, cases))
    assert profile.draft_first_ms == pytest.approx([0.05])
    assert profile.draft_next_ms == pytest.approx([0.05])


def test_drafting_at_a_single_depth_counts_as_verification(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("forerun"), "propagate", True)
    with caplog.at_level("WARNING", logger="forerun"):
        profile = load_profile(write_json(tmp_path, [time_case(1, 4, 0, 3)]))
    assert len(profile.draft_requests) == 0
    assert profile.verify(4) == pytest.approx(2.0 + 0.4 + 0.3 + 0.35)
    assert "1 timed shapes draft at a single depth" in caplog.text


@pytest.mark.parametrize("case", ["prefill=1*512", "verify=0*4@8", "verify=4@8", 7])
def test_cases_that_are_no_verification_are_refused_by_name(tmp_path: Path, case: Any) -> None:
    path = write_json(tmp_path, [{"case": case, "median_us": 1.0}])
    with pytest.raises(ConfigError, match="is no timed verification; cases look like verify="):
        load_profile(path)


def test_an_additive_table_becomes_rows_and_a_price_per_request(tmp_path: Path) -> None:
    table = {
        "bias_seconds": 0.010,
        "bs_probes": [1, 8, 16],
        "alpha_seconds": [0.0021, 0.0028, 0.0036],
        "m_probes": [4, 16, 64],
        "theta_seconds": [0.001, 0.002, 0.006],
    }
    profile = load_profile(write_json(tmp_path, table), KEY)
    assert profile.request_ms == pytest.approx(0.1)
    assert profile.verify_rows.tolist() == [1, 4, 16, 64]
    assert profile.verify_ms == pytest.approx([13.0, 13.0, 14.0, 18.0])
    assert profile.key == {}


def test_a_table_of_rates_becomes_times(tmp_path: Path) -> None:
    table = {"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [100.0, 50.0]}
    profile = load_profile(write_json(tmp_path, {**table, "max_batch_tokens": 64}))
    assert profile.verify(np.array([1, 64])).tolist() == [10.0, 20.0]


@pytest.mark.parametrize(
    "table",
    [
        {"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [100.0]},
        {"sample_batch_tokens": [], "sample_steps_per_sec": []},
        {"sample_batch_tokens": [1], "sample_steps_per_sec": [0.0]},
        {"sample_batch_tokens": [1], "sample_steps_per_sec": ["fast"]},
    ],
)
def test_a_damaged_table_of_another_engine_is_damaged(tmp_path: Path, table: Any) -> None:
    with pytest.raises(ProfileMismatch, match="is damaged"):
        load_profile(write_json(tmp_path, table))
