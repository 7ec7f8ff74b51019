"""Forerun beside vLLM CPU, llama.cpp and transformers: same weights, same prompts, interleaved.

Everything runs on this machine with as many threads as it has cores. Peers are installed on first
use into the cache folder (vLLM: 4 GB; llama.cpp compiles for about 12 minutes). Prints one table
per model; the last line is JSON. A peer that fails is shown with its reason.

    python -m benchmarks.peers                                   # everything for SmolLM2, 3 blocks
    python -m benchmarks.peers --models smollm2-135m-instruct,qwen2.5-coder-0.5b-instruct
    python -m benchmarks.peers --blocks 1 --rows decode --streams 1,4 --only forerun,llama.cpp
    python -m benchmarks.peers --rows quantised      # the model's own file, beside bf16 decoding
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.adapters import ENGINES, PEERS, SERVERS, Setup
from benchmarks.peers.quantised import build_quantised_table
from benchmarks.peers.report import build_model_report, build_notes, build_table
from benchmarks.peers.rows import KINDS, QUANTISED_PEERS, Row, build_rows
from benchmarks.peers.runner import BlockRunner, Phase
from benchmarks.peers.weights import prepare_model
from benchmarks.peers.work import WorkBuilder, read_bandwidth
from benchmarks.progress import Watcher, show_progress
from rich.console import Console

from forerun import env
from forerun.bench.paired.runner import interrupt_on_sigterm
from forerun.bench.results.provenance import collect_provenance
from forerun.config import DEFAULT_MODEL
from forerun.errors import ConfigError, describe_unknown_key
from forerun.logs import configure_logging, get_logger

logger = get_logger(__name__)

EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
_MIN_COLUMNS = 210


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the command line asks for."""

    models: Sequence[str]
    peers: Sequence[str]
    rows: Sequence[Row]
    num_blocks: int
    home: Path

    def peers_of(self, row: Row) -> list[str]:
        """Return who takes part in a row."""
        return select_peers(self.peers, row)

    @property
    def num_cells(self) -> int:
        """Measurements in all."""
        per_block = sum(len(self.peers_of(row)) for row in self.rows)
        return len(self.models) * self.num_blocks * per_block


def select_peers(peers: Sequence[str], row: Row) -> list[str]:
    """Return which of the peers take part in a row; not all compute on the model's own file."""
    return [peer for peer in peers if not row.is_quantised or peer in QUANTISED_PEERS]


def parse_plan(arguments: Sequence[str] | None = None) -> Plan:
    """Return the plan of a command line; raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = partial(parser.add_argument, metavar="LIST")
    add("--models", default=DEFAULT_MODEL, help="bundled models (default: %(default)s)")
    add("--only", default=",".join(PEERS), help="peers to measure (default: %(default)s)")
    add("--rows", default=",".join(KINDS), help="kinds of rows (default: %(default)s)")
    add("--streams", default="1,4,16,64", help="streams (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=3, metavar="N", help="repeats (default: 3)")
    parser.add_argument(
        "--peers-dir",
        type=Path,
        default=env.cache_dir() / "peers",
        metavar="FOLDER",
        help="environments, weights and logs (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    peers = _split(args.only)
    for peer in peers:
        if peer not in PEERS:
            raise ConfigError(describe_unknown_key(peer, PEERS, kind="peer"))
    if args.blocks < 1:
        raise ConfigError(f"--blocks must be at least 1, got {args.blocks}.")
    try:
        streams = [int(text) for text in _split(args.streams)]
    except ValueError as error:
        raise ConfigError(
            f"--streams must be numbers with commas, such as 1,4; got {args.streams!r}."
        ) from error
    rows = [row for row in build_rows(_split(args.rows), streams) if select_peers(peers, row)]
    return Plan(
        models=_split(args.models),
        peers=peers,
        rows=rows,
        num_blocks=args.blocks,
        home=args.peers_dir.resolve(),
    )


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class PeerBenchmark:
    """Runs a plan model by model; `reports` holds what has been measured, also in between."""

    def __init__(self, plan: Plan, watcher: Watcher) -> None:
        self._plan = plan
        self._watcher = watcher
        self.reports: list[dict[str, Any]] = []

    def run(self) -> None:
        """Measure every model."""
        for model in self._plan.models:
            self._run_model(model)

    def _run_model(self, model: str) -> None:
        plan, note = self._plan, self._watcher.note
        files = prepare_model(model, plan.home, note)
        num_threads = os.cpu_count() or 1
        log_dir = plan.home / "logs" / model
        log_dir.mkdir(parents=True, exist_ok=True)
        setup = Setup(
            files=files, home=plan.home, log_dir=log_dir, num_threads=num_threads, note=note
        )
        runner = BlockRunner(
            num_blocks=plan.num_blocks,
            build_work=WorkBuilder(files).build,
            read_bandwidth=partial(read_bandwidth, num_threads),
            note=note,
            advance=self._watcher.advance,
        )
        try:
            for phase in self._build_phases(setup):
                runner.run(phase)
        finally:
            self.reports.append(build_model_report(files, plan.rows, runner.measured))

    def _build_phases(self, setup: Setup) -> list[Phase]:
        plan = self._plan
        parts = (("engine", ENGINES, False), ("server", SERVERS, True))
        return [
            Phase(
                name=name,
                rows=[row for row in plan.rows if row.is_served == is_served],
                peers_of=plan.peers_of,
                factories={peer: partial(start, setup) for peer, start in starts.items()},
            )
            for name, starts, is_served in parts
        ]


def show(benchmark: PeerBenchmark, plan: Plan) -> None:
    """Print the tables, what stood in for what, every failure, and the JSON line."""
    console = Console()
    # Where stdout is no terminal, rich would assume 80 columns and fold the figures.
    console.width = max(console.width, _MIN_COLUMNS)
    for report in benchmark.reports:
        if report["rows"]:
            console.print(build_table(report, plan.peers))
        if report["quantised"] is not None:
            console.print(build_quantised_table(report, plan.peers))
        for line in build_notes(report):
            console.print(line, markup=False, highlight=False)
    result = {
        "benchmark": "peers",
        "num_blocks": plan.num_blocks,
        "num_threads": os.cpu_count(),
        "provenance": collect_provenance(),
        "models": benchmark.reports,
    }
    sys.stdout.write(json.dumps(result) + "\n")


def run(plan: Plan) -> int:
    """Measure and show what has been measured, also after an interrupt; returns the exit code."""
    code = 0
    with interrupt_on_sigterm(), show_progress(plan.num_cells) as watcher:
        benchmark = PeerBenchmark(plan, watcher)
        try:
            benchmark.run()
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except ConfigError as error:
            logger.error("%s", error)
            code = EXIT_CONFIG
    show(benchmark, plan)
    return code


def main() -> int:
    """Run the benchmark from the command line; returns the exit code."""
    configure_logging("peers")
    try:
        plan = parse_plan()
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    return run(plan)


if __name__ == "__main__":
    sys.exit(main())
