"""The paired runner with real server processes: order, failures, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.bench.options import BenchConfig
from forerun.bench.paired import server as server_module
from forerun.bench.paired.plan import LoadPoint, PairedPlan, parse_arm
from forerun.bench.paired.runner import PairedRunner
from forerun.bench.paired.server import Server
from forerun.bench.run import Watcher
from forerun.errors import ConfigError

NULL = f"{sys.executable} -m forerun.bench.null_server --port {{port}} --events-per-s 400"
_PATIENCE_S = 30.0


def make_plan(tmp_path: Path, *arms: str, **options: Any) -> PairedPlan:
    fields: dict[str, Any] = {
        "arms": [parse_arm(text) for text in arms],
        "loads": [LoadPoint(max_concurrency=2)],
        "num_blocks": 2,
        "bench": BenchConfig(num_prompts=4, custom_output_len=4),
        "result_dir": tmp_path,
    }
    return PairedPlan(**{**fields, **options})


def make_watcher(on_finished: Callable[[int, int], None] = lambda _done, _total: None) -> Watcher:
    return Watcher(note=lambda _text: None, on_finished=on_finished)


def wait_gone(pid: int) -> bool:
    """Wait until a process ended; one that nobody has waited for yet counts as ended."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def write_server(path: Path, *, ignores_sigterm: bool) -> str:
    """Write a server that has a child of its own, and return its command."""
    handler = "signal.SIG_IGN" if ignores_sigterm else "signal.SIG_DFL"
    path.write_text(
        "import pathlib, signal, subprocess, sys\n"
        f"signal.signal(signal.SIGTERM, {handler})\n"
        # The child outlives its parent's SIGTERM.
        "code = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()'\n"
        "child = subprocess.Popen([sys.executable, '-c', code])\n"
        f"pathlib.Path({str(path.parent / 'child')!r}).write_text(str(child.pid))\n"
        "from forerun.bench.null_server import main\n"
        "main(sys.argv[1:])\n"
    )
    return f"{sys.executable} {path} --port {{port}}"


def test_blocks_rotate_share_prompts_and_are_stored(tmp_path: Path) -> None:
    report = PairedRunner(make_plan(tmp_path, f"a={NULL}", f"b={NULL}"), make_watcher()).run()
    assert [(run["arm"], run["block"]) for run in report["runs"]] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("a", 1),
    ]
    assert all(run["error"] is None for run in report["runs"])
    throughput = next(c for c in report["comparisons"] if c["metric"] == "output_throughput")
    assert len(throughput["ratios"]) == 2
    assert json.loads((tmp_path / "paired.json").read_text()) == json.loads(json.dumps(report))

    def read_ids(arm: str, block: int) -> list[str]:
        lines = (tmp_path / f"{arm}-load2-block{block}.records.jsonl").read_text().splitlines()
        return sorted(json.loads(line)["request_id"] for line in lines)

    assert read_ids("a", 0) == read_ids("b", 0)
    assert read_ids("a", 1) == read_ids("b", 1)
    assert read_ids("a", 0) != read_ids("a", 1)


def test_an_arm_that_does_not_start_spoils_its_own_cells_only(tmp_path: Path) -> None:
    broken = f"{sys.executable} -c 'import sys; sys.exit(\"no such model\")' {{port}}"
    plan = make_plan(tmp_path, f"a={NULL}", f"b={broken}", num_blocks=1)
    good, bad = PairedRunner(plan, make_watcher()).run()["runs"]
    assert good["error"] is None
    assert "ended with code 1 before it was ready (no such model)" in bad["error"]


def test_an_interrupt_stops_the_server_and_keeps_the_report(tmp_path: Path) -> None:
    command = write_server(tmp_path / "server.py", ignores_sigterm=False)

    def interrupt(_done: int, _total: int) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    plan = make_plan(tmp_path, f"a={command}", f"b={command}")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        PairedRunner(plan, make_watcher(interrupt)).run()
    assert signal.getsignal(signal.SIGTERM) is before
    assert wait_gone(int((tmp_path / "child").read_text()))
    assert json.loads((tmp_path / "paired.json").read_text())["runs"] == []


@pytest.mark.parametrize("ignores_sigterm", [False, True])
def test_stopping_ends_the_whole_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores_sigterm: bool
) -> None:
    if ignores_sigterm:
        monkeypatch.setattr(server_module, "_STOP_TIMEOUT_S", 0.05)
    command = write_server(tmp_path / "server.py", ignores_sigterm=ignores_sigterm)
    with Server(command, tmp_path / "log", _PATIENCE_S) as server:
        child = int((tmp_path / "child").read_text())
        assert server.exit_code is None
    assert server.exit_code is not None
    assert wait_gone(child)


def test_a_server_that_never_gets_ready_is_given_up_and_ended(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'import signal; signal.pause()' {{port}}"
    server = Server(command, tmp_path / "log", 0.01)
    with pytest.raises(ConfigError, match="not ready after 0.01 s"):
        server.__enter__()
    assert server.exit_code is not None


def test_a_command_that_does_not_exist_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot start 'no-such-program'"):
        Server("no-such-program {port}", tmp_path / "log", 1.0).__enter__()
