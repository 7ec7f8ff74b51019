"""What mistakes at `forerun train`, `calibrate` and `evaluate` look like: one sentence, exit 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.cli import EXIT_USAGE, main

NGRAM = '{"method": "ngram"}'


def refuse(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the one sentence of a refusal."""
    assert main(list(args)) == EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err.strip().splitlines()[-1]


def write_prompts(path: Path, ids: list[str]) -> str:
    rows = [{"id": name, "messages": [{"role": "user", "content": "Hi"}]} for name in ids]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--num-prompts", "0"), "--num-prompts must be at least 1"),
        (("--concurrency", "0"), "--concurrency must be at least 1"),
        (("--shard-prompts", "-3"), "--shard-prompts must be at least 1"),
        (("--temperatures", "-1"), "temperature must be in"),
        (("--max-tokens", "0"), "max_tokens must be in"),
        (("--max-disk", "lots"), "--max-disk must be a size"),
        (("--temperature", "1"), "did you mean '--temperatures'"),
    ],
)
def test_bad_flags_of_generate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", ["a"])
    output = str(tmp_path / "answers")
    args = ("train", "generate", "--prompts", prompts, "--output", output, *flags)
    assert told in refuse(capsys, *args)
    assert not (tmp_path / "answers").exists()


def test_prompt_files_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def try_file(name: str) -> str:
        flags = ("--prompts", str(tmp_path / name), "--output", str(tmp_path / "answers"))
        return refuse(capsys, "train", "generate", *flags)

    assert "cannot read" in try_file("missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "holds no rows" in try_file("empty.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": 3}\n')
    assert "line 2" in try_file("broken.jsonl")
    write_prompts(tmp_path / "twice.jsonl", ["a", "b", "a"])
    assert "'a' occurs more than once" in try_file("twice.jsonl")


def test_training_without_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--data", str(tmp_path), "--output", str(tmp_path / "drafter"))
    assert "forerun train generate" in refuse(capsys, "train", "run", *flags)
    assert "recipe" in refuse(capsys, "train", "run", *flags, "--recipe", "dsparc")


@pytest.mark.parametrize("command", ["evaluate", "calibrate"])
def test_rollouts_need_something_to_roll_out(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--prompts", "small", "--speculative-config")
    told = refuse(capsys, command, *flags, '{"method": "none"}')
    assert "drafter" in told
    told = refuse(capsys, command, "--prompts", "smal", "--speculative-config", NGRAM)
    assert "did you mean 'small'" in told or "confidence head" in told


def test_calibration_of_a_drafter_without_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    told = refuse(capsys, "calibrate", "--prompts", "small", "--speculative-config", NGRAM)
    assert "confidence head" in told
