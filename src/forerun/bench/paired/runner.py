"""Runs a paired plan: block by block, arm by arm, load by load. Nothing finished is ever lost.

After every arm of a block the report is written again. A server that does not start, dies or fails
requests spoils its own cells and no more.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import asdict, replace
from types import FrameType
from typing import Any

from forerun.bench.paired.compare import METRICS, PairedRun, compare_runs
from forerun.bench.paired.plan import Arm, LoadPoint, PairedPlan, order_arms, order_loads
from forerun.bench.paired.server import Server
from forerun.bench.results.checks import OK
from forerun.bench.results.provenance import collect_provenance
from forerun.bench.run import Watcher, make_folder, measure, write_json
from forerun.errors import ConfigError

REPORT_SCHEMA_VERSION = 1
REPORT_NAME = "paired.json"


class PairedRunner:
    """Carries out one plan. `report` is complete after `run`, and true at any time before."""

    def __init__(self, plan: PairedPlan, watcher: Watcher) -> None:
        self._plan = plan
        self._watcher = watcher
        self._provenance = collect_provenance()
        self.runs: list[PairedRun] = []

    def run(self) -> dict[str, Any]:
        """Run every block and return the report; raises KeyboardInterrupt after an interrupt."""
        make_folder(self._plan.result_dir)
        with interrupt_on_sigterm():
            for block in range(self._plan.num_blocks):
                for order, arm in enumerate(order_arms(self._plan.arms, block)):
                    try:
                        self._run_arm(arm, block, order)
                    finally:
                        write_json(self._plan.result_dir / REPORT_NAME, self.build_report())
        return self.build_report()

    def build_report(self) -> dict[str, Any]:
        """Return runs and comparisons so far."""
        names = [arm.name for arm in self._plan.arms]
        bench = asdict(self._plan.bench)
        bench = {key: value for key, value in bench.items() if key not in ("api_key", "base_url")}
        bench["request_rate"] = str(bench["request_rate"])
        return {
            "schema_version": REPORT_SCHEMA_VERSION,
            "arms": [asdict(arm) for arm in self._plan.arms],
            "loads": [load.name for load in self._plan.loads],
            "num_blocks": self._plan.num_blocks,
            "bench": bench,
            "provenance": self._provenance,
            "runs": [asdict(run) for run in self.runs],
            "comparisons": compare_runs(self.runs, names),
        }

    def _run_arm(self, arm: Arm, block: int, order: int) -> None:
        """Measure an arm under every load of a block."""
        loads = order_loads(self._plan.loads, self._plan.bench.seed, block)
        done = 0
        try:
            with self._open_server(arm, block) as base_url:
                for load in loads:
                    cell = PairedRun(arm=arm.name, load=load.name, block=block, order=order)
                    self.runs.append(self._run_cell(cell, load, base_url))
                    done += 1
        except ConfigError as error:
            for load in loads[done:]:
                cell = PairedRun(arm=arm.name, load=load.name, block=block, order=order)
                self.runs.append(replace(cell, error=str(error)))

    @contextlib.contextmanager
    def _open_server(self, arm: Arm, block: int) -> Iterator[str]:
        if arm.command is None:
            assert arm.base_url is not None, arm
            yield arm.base_url
            return
        self._watcher.note(f"block {block + 1}: starting {arm.name}")
        log_path = self._plan.result_dir / f"{arm.name}-block{block}.log"
        with Server(arm.command, log_path, self._plan.server_ready_timeout_s) as server:
            yield server.base_url

    def _run_cell(self, cell: PairedRun, load: LoadPoint, base_url: str) -> PairedRun:
        name = f"{cell.arm}-load{cell.load}-block{cell.block}.json"
        config = replace(
            self._plan.build_config(load, cell.block, base_url),
            label=cell.arm,
            save_result=True,
            result_dir=str(self._plan.result_dir),
            result_filename=name,
        )
        watcher = replace(self._watcher, note=lambda text: self._note(cell, text))
        extra = {"arm": cell.arm, "block": cell.block, "order": cell.order}
        outcome = measure(config, watcher, extra)
        if outcome.is_interrupted:
            raise KeyboardInterrupt
        result = outcome.result
        gates = {name: text for name, text in result["sd_gates"].items() if text != OK}
        return replace(
            cell,
            error=gates.get("all_completed"),
            values={key: result[key] for key in METRICS if result.get(key) is not None},
            failed_gates=gates,
        )

    def _note(self, cell: PairedRun, text: str) -> None:
        total = self._plan.num_blocks
        self._watcher.note(f"block {cell.block + 1}/{total}, {cell.arm}, load {cell.load}: {text}")


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that servers are stopped on the way out."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
