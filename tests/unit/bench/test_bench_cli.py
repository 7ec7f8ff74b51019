"""`forerun bench` on the command line: output, exit codes, and what mistakes look like."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from forerun.cli import main
from unit.bench.stub_server import StubServer

NULL = f"{sys.executable} -m forerun.bench.null_server --port {{port}} --events-per-s 400"


def run_serve(server: StubServer, *options: str) -> int:
    return main(["bench", "serve", "--base-url", server.base_url, *options])


def test_the_last_line_is_json_and_the_table_comes_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StubServer() as server:
        code = run_serve(server, "--num-prompts", "4", "--max-concurrency", "2", "--json")
    *table, last = capsys.readouterr().out.splitlines()
    assert code == 0
    assert json.loads(last)["completed"] == 4
    shown = "\n".join(table)
    assert "requests completed" in shown
    assert "itl_token" in shown
    assert "4 requests; p99 over requests needs 300" in shown


def test_failed_requests_end_with_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(fails_after=1) as server:
        assert run_serve(server, "--num-prompts", "2") == 1
    assert "2 of 2 requests failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "x"], "does not serve the model 'x'"),
        (["--dataset-name", "custom", "--dataset-path", "missing.jsonl"], "cannot read the data"),
        (["--num-prompt", "3"], "did you mean '--num-prompts'"),
        (["--request-rate", "-1"], "--request-rate must be above 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with StubServer() as server:
        assert run_serve(server, *options) == 2
    captured = capsys.readouterr()
    assert message in captured.err.replace("\n", " ")
    assert captured.err.count("forerun: ") == 1
    assert captured.out == ""


def test_paired_prints_ratios_and_reports_missing_cells(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arms = ["--arm", f"a={NULL}", "--arm", f"b={sys.executable} -c pass {{port}}"]
    options = ["--blocks", "1", "--loads", "2", "--num-prompts", "2", "--custom-output-len", "4"]
    command = ["bench", "paired", *arms, *options, "--result-dir", str(tmp_path), "--json"]
    assert main(command) == 1
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert [run["arm"] for run in report["runs"]] == ["a", "b"]
    assert "no figure for b, load 2, block 1: the server ended with code 0" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "two arms"),
        (["--arm", f"a={NULL}"], "two arms"),
        (["--max-concurrency", "3"], "does not go with bench paired; use --loads"),
        (["--blocks", "0", "--arm", f"a={NULL}", "--arm", f"b={NULL}"], "--blocks"),
    ],
)
def test_mistakes_of_a_plan_are_code_2(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["bench", "paired", *options]) == 2
    assert message in capsys.readouterr().err
