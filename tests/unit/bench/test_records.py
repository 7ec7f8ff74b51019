"""Record files: what is written comes back, and what is damaged is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.bench.records import RecordFile, read_records
from forerun.errors import ConfigError
from unit.bench.scenario import CONCURRENCY, SCRIPTS
from unit.bench.scripted_server import play_scripts


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    records = play_scripts(SCRIPTS, CONCURRENCY)
    file = RecordFile(tmp_path / "r.jsonl")
    for record in records:
        file.append(record)
    # Not closed yet: rows must survive whatever happens to the process.
    assert read_records(file.path) == records
    file.close()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting"),
        ("{}", "not a record of schema version 1"),
        ('{"schema_version": 2}', "not a record of schema version 1"),
        ('{"schema_version": 1, "request_id": "x"}', "the fields differ: .*sent_s"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "r.jsonl"
    (record, *_) = play_scripts(SCRIPTS, CONCURRENCY)
    path.write_text(f"{record.to_json()}\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{reason}"):
        read_records(path)


def test_files_that_cannot_be_used_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        RecordFile(tmp_path / "none" / "r.jsonl")
    with pytest.raises(ConfigError, match="cannot read"):
        read_records(tmp_path / "none.jsonl")
