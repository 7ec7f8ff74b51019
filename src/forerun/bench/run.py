"""One measured run from its configuration to its result, and the files it leaves.

Order of events: rows, server check, warm-up, load, result. Records are written as requests finish;
an interrupt ends the load, and what had finished becomes the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forerun.bench.client.endpoint import (
    Endpoint,
    read_server_info,
    reset_prefix_cache,
    resolve_endpoint,
)
from forerun.bench.client.load import Load, LoadGenerator
from forerun.bench.options import BenchConfig
from forerun.bench.records import RecordFile, RequestRecord
from forerun.bench.results.provenance import collect_provenance
from forerun.bench.results.result import RunFacts, build_file_stem, build_result
from forerun.bench.workload import Row, build_arrivals, build_warmup_rows, build_workload
from forerun.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Watcher:
    """Who wants to know how a run goes."""

    note: Callable[[str], None]
    on_finished: Callable[[int, int], None]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run left behind."""

    result: dict[str, Any]
    records: list[RequestRecord]
    is_interrupted: bool
    paths: list[Path] = field(default_factory=list)


def measure(config: BenchConfig, watcher: Watcher, extra: dict[str, Any] | None = None) -> Outcome:
    """Run one load on one server; raises ConfigError if it cannot begin.

    `extra` joins the result under `sd_`. An interrupt before the first finished request is passed
    on, a later one is told by the outcome.
    """
    rows = build_workload(config, watcher.note)
    endpoint = resolve_endpoint(config, rows)
    if config.num_warmups:
        watcher.note("warming up")
        warmups = build_warmup_rows(rows, config.num_warmups)
        _run_load(config, endpoint, warmups, lambda _: None, is_paced=False)
    extra = dict(extra or {}) | {"server_info": read_server_info(endpoint)}
    if config.reset_prefix_cache:
        extra["prefix_cache_reset"] = reset_prefix_cache(endpoint)
    facts = RunFacts(
        config=config,
        endpoint=endpoint,
        num_prompts=len(rows),
        started_at=datetime.now(UTC),
        provenance=collect_provenance(),
        extra=extra,
    )
    return _measure_rows(facts, rows, watcher)


def _measure_rows(facts: RunFacts, rows: Sequence[Row], watcher: Watcher) -> Outcome:
    config = facts.config
    result_path, file = _open_files(facts) if config.save_result else (None, None)
    records: list[RequestRecord] = []

    def on_finished(record: RequestRecord) -> None:
        records.append(record)
        if file is not None:
            file.append(record)
        watcher.on_finished(len(records), len(rows))

    watcher.note("running")
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    is_interrupted = False
    try:
        _run_load(config, facts.endpoint, rows, on_finished, is_paced=True)
    except KeyboardInterrupt:
        if not records:
            raise
        is_interrupted = True
    finally:
        if file is not None:
            file.close()
    cpu_share = (time.process_time() - started_cpu_s) / (time.perf_counter() - started_s)
    outcome = Outcome(
        result=build_result(facts, records, cpu_share),
        records=records,
        is_interrupted=is_interrupted,
    )
    if result_path is not None and file is not None:
        write_json(result_path, outcome.result)
        outcome.paths = [result_path, file.path]
    return outcome


def _run_load(
    config: BenchConfig,
    endpoint: Endpoint,
    rows: Sequence[Row],
    on_finished: Callable[[RequestRecord], None],
    *,
    is_paced: bool,
) -> None:
    arrivals_s = None
    if is_paced and not config.is_closed_loop:
        arrivals_s = build_arrivals(len(rows), config.request_rate, config.seed)
    load = Load(
        max_concurrency=config.max_concurrency,
        arrivals_s=arrivals_s,
        timeout_s=config.request_timeout_s,
    )
    with _no_garbage_collection():
        asyncio.run(LoadGenerator(endpoint, load, on_finished).run(rows))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep collector pauses out of the time stamps; a load makes next to no cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _open_files(facts: RunFacts) -> tuple[Path, RecordFile]:
    """Return where the result goes, and the open file of its records."""
    folder = Path(facts.config.result_dir)
    name = facts.config.result_filename or f"{build_file_stem(facts)}.json"
    make_folder(folder)
    return folder / name, RecordFile(folder / f"{name.removesuffix('.json')}.records.jsonl")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Store a result; raises ConfigError if that fails."""
    try:
        path.write_text(json.dumps(value, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror or error}; choose another --result-dir."
        ) from error


def make_folder(path: Path) -> None:
    """Make the result folder; raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the folder {path}: {error.strerror or error}; choose another "
            "--result-dir."
        ) from error
