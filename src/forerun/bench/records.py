"""One row per request: what a client saw of it. Everything else is computed from these rows.

Times are seconds on a monotonic clock from the start of the run:

    intent_s   when the schedule wanted it sent (closed loop: when a place became free)
    ready_s    when a place was free as well; ready - intent is queueing in the client, by request
    sent_s     just before the bytes were written; sent - ready is the client's own delay
    event_s    when each event that brought tokens was read; equal times mean one read
    end_s      when the last byte was read, or the failure was noticed

`event_tokens` runs beside `event_s`; None if the server does not tell. A file is JSON lines, each
with the schema version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from forerun.bench.client.stream import UNKNOWN
from forerun.errors import ConfigError

SCHEMA_VERSION = 1


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request. `error` is None exactly if its answer is whole."""

    request_id: str
    category: str
    max_tokens: int
    intent_s: float
    ready_s: float
    sent_s: float
    end_s: float
    event_s: list[float] = field(default_factory=list)
    event_tokens: list[int] | None = None
    token_source: str = UNKNOWN
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    speculation: dict[str, Any] | None = None

    def to_json(self) -> str:
        """Return the row as one line."""
        row = {"schema_version": SCHEMA_VERSION} | asdict(self)
        return json.dumps(row, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> RequestRecord:
        """Read a row back; raises ValueError."""
        row = json.loads(line)
        if not isinstance(row, dict) or row.pop("schema_version", None) != SCHEMA_VERSION:
            raise ValueError(f"this is not a record of schema version {SCHEMA_VERSION}")
        names = {item.name for item in fields(cls)}
        if row.keys() != names:
            raise ValueError(f"the fields differ: {', '.join(sorted(row.keys() ^ names))}")
        return cls(**row)


class RecordFile:
    """Appends rows as requests finish, so that they outlive whatever happens next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _guard(path, lambda: path.open("w", encoding="utf-8"))

    def append(self, record: RequestRecord) -> None:
        """Write one row through to the file; raises ConfigError if it cannot be stored."""
        _guard(self.path, lambda: self._file.write(record.to_json() + "\n"))
        _guard(self.path, self._file.flush)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def _guard(path: Path, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another --result-dir."
        ) from error


def read_records(path: Path) -> list[RequestRecord]:
    """Read a file of rows; raises ConfigError naming the line at fault."""
    records = []
    for number, line in enumerate(_guard_read(path).splitlines(), 1):
        try:
            records.append(RequestRecord.from_json(line))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}.") from error
    return records


def _guard_read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}.") from error
