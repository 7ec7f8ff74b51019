"""`forerun doctor`: tables or JSON on stdout, problems last, exit code 0 or 1."""

from __future__ import annotations

import json

import pytest

from forerun.cli import main
from forerun.doctor import diagnose as diagnosing
from forerun.doctor.report import Fact, Problem, Report, Section

CPU = Section(name="cpu", facts=[Fact("num_cores", 2, "2 [by] affinity")])
PROBLEM = Problem(what="huge pages are [off]", advice="switch them on")
MEMORY = Section(name="memory", facts=[Fact("total_bytes", 5, "5 B")], problems=[PROBLEM])


def run(
    monkeypatch: pytest.MonkeyPatch, *options: str, sections: list[Section]
) -> tuple[int, list[bool]]:
    """Run the command on a made-up report; return exit code and what it asked to measure."""
    asked = []

    def diagnose(*, measure: bool) -> Report:
        asked.append(measure)
        return Report(sections)

    monkeypatch.setattr(diagnosing, "diagnose", diagnose)
    return main(["doctor", *options]), asked


def test_no_problem_is_exit_code_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, sections=[CPU]) == (0, [True])
    shown = capsys.readouterr().out
    assert "cores" in shown
    assert "2 [by] affinity" in shown
    assert shown.splitlines()[-1] == "no problems found"


def test_problems_come_last_with_what_to_do_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--no-measure", sections=[MEMORY, CPU]) == (1, [False])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "problem 1, memory: huge pages are [off]",
        "  what to do: switch them on",
    ]


def test_json_has_the_values_and_the_same_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json", sections=[CPU, MEMORY])[0] == 1
    assert json.loads(capsys.readouterr().out) == {
        "cpu": {"num_cores": 2},
        "memory": {"total_bytes": 5},
        "problems": [
            {
                "section": "memory",
                "problem": "huge pages are [off]",
                "advice": "switch them on",
            }
        ],
    }


def test_an_unknown_option_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--jason"]) == 2
    assert "did you mean '--json'?" in capsys.readouterr().err
