"""The command line: flags come from the config fields, a mistake is one sentence and code 2."""

from __future__ import annotations

import argparse
import logging
import socket
from collections.abc import Iterator
from dataclasses import fields

import pytest

import forerun
from forerun.cli import main
from forerun.commands import generate, serve
from forerun.commands.flags import ENGINE_CONFIGS, Parser, build_engine_config
from forerun.config import ServerConfig
from forerun.engine.messages import StepStats


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Put back the package's logger, which `serve` points at this process's stderr."""
    logger = logging.getLogger("forerun")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], level, logger.propagate = before
    logger.setLevel(level)


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    serve.add_parser(parser.add_subparsers())
    return parser.parse_args(["serve", *argv])


def fail(capsys, *argv: str) -> str:
    """Return the one line on stderr of a command that must exit with code 2."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_every_config_field_has_a_flag() -> None:
    parser = Parser(prog="test")
    flags = serve.add_parser(parser.add_subparsers()).list_flags()
    for config in (*ENGINE_CONFIGS, ServerConfig):
        for field in fields(config):
            assert "--" + field.name.replace("_", "-") in flags


def test_flags_become_config_values_and_the_rest_stays_default() -> None:
    args = parse(
        *("--max-num-seqs", "8", "--no-enable-prefix-caching", "--kv-cache-memory", "2G"),
        *("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'),
    )
    config = build_engine_config(args)
    assert config.scheduler.max_num_seqs == 8
    assert config.scheduler.max_waiting_requests == 1024
    assert not config.cache.enable_prefix_caching
    assert config.cache.kv_cache_memory == "2G"
    assert config.speculative.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "--prot", "1"], "did you mean '--port'?"),
        (["serve", "--max-num-seq=1"], "unknown option '--max-num-seq'; did you mean"),
        (["generate", "hi", "--temprature", "1"], "did you mean '--temperature'?"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "a", "--model", "b"], "given twice"),
        (["serve", "--port", "x"], "invalid int value: 'x'"),
        (["serve", "--port", "70000"], "--port must be in 0..65535"),
        (["serve", "--speculative-config", "{"], "not valid JSON"),
        (["serve", "--speculative-config", '{"methd": "none"}'], "did you mean 'method'?"),
        (["serve", "no-such-model"], "'no-such-model' is neither"),
        (["serve", "--host", "192.0.2.1"], "cannot listen on 192.0.2.1:8000"),
        (["generate", "hi", "--top-p", "2"], "top_p must be in"),
        (["generate"], "PROMPT"),
        (["sirve"], "'sirve'"),
        ([], "COMMAND"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(capsys, argv, said) -> None:
    assert said in fail(capsys, *argv)


def test_a_port_in_use_is_found_before_anything_is_loaded(capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = fail(capsys, "serve", "no-such-model", "--port", port)
    assert f"127.0.0.1:{port} is in use" in said


def test_version_is_printed(capsys) -> None:
    with pytest.raises(SystemExit) as info:
        main(["--version"])
    assert info.value.code == 0
    assert capsys.readouterr().out.strip() == f"forerun {forerun.__version__}"


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_names_every_flag_and_its_default(capsys, command) -> None:
    with pytest.raises(SystemExit) as info:
        main([command, "--help"])
    assert info.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "requests running at once (default: 256)" in shown


def test_speed_is_tokens_after_the_first_and_acceptance_comes_from_the_steps() -> None:
    steps = [
        StepStats(num_draft_tokens=4),
        StepStats(num_draft_tokens=4, num_spec_steps=1, num_accepted_tokens=3),
    ]
    text = generate.describe_speed(num_tokens=21, first_token_s=0.05, decode_s=2.0, steps=steps)
    assert text == (
        "21 tokens, first after 50 ms, then 10.0 tok/s; "
        "accepted 3 of 8 drafted, acceptance length 4.00"
    )


def test_without_speculation_speed_says_nothing_about_it() -> None:
    text = generate.describe_speed(num_tokens=1, first_token_s=0.05, decode_s=0.0, steps=[])
    assert text == "1 tokens, first after 50 ms"
