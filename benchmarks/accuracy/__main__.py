"""Accuracy of quantised modes against float32 with the same stored weights.

Real text of four kinds is read window by window by all arms in lockstep, through the engine's own
runner and paged attention; every next-token distribution is compared with float32's. Then greedy
answers to code prompts are compared. Two tables; the last line is JSON. Run alone: it takes some
minutes on two cores.

    python -m benchmarks.accuracy
    python -m benchmarks.accuracy --arms exact,int8 --tokens-per-kind 2000 --prompts 0    # a look
    python -m benchmarks.accuracy --model qwen2.5-coder-0.5b-instruct
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.arms import ARMS, REFERENCE, Arm, start_arm
from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.measures import RowMeasures
from benchmarks.accuracy.outputs import TokenIds, generate
from benchmarks.accuracy.report import (
    build_distribution_table,
    build_notes,
    build_output_table,
    describe_arm,
    describe_outputs,
)
from benchmarks.accuracy.text import Window, build_windows, count_tokens, read_code_prompts
from benchmarks.peers.weights import write_bf16_gguf
from benchmarks.progress import Watcher, show_progress
from rich.console import Console

from forerun import LLM
from forerun.bench.results.provenance import collect_provenance
from forerun.config import DEFAULT_MODEL
from forerun.data.bundled import resolve_model_path
from forerun.errors import ConfigError, describe_unknown_key
from forerun.logs import configure_logging
from forerun.tokenization import load_tokenizer

_MIN_COLUMNS = 120
EXIT_CONFIG = 2

Engines = dict[str, LLM]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked; raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="model to load (default: %(default)s)")
    add("--arms", default=",".join(ARMS), metavar="LIST", help="(default: %(default)s)")
    add("--tokens-per-kind", type=int, default=8000, help="(default: %(default)s)")
    add("--window", type=int, default=512, help="tokens of a window (default: %(default)s)")
    add("--rows-per-step", type=int, default=64, help="tokens per forward (default: %(default)s)")
    add("--prompts", type=int, default=60, help="code prompts; 0: none (default: %(default)s)")
    add("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    args = parser.parse_args(arguments)
    args.arms = [name.strip() for name in args.arms.split(",") if name.strip()]
    for name in args.arms:
        if name not in ARMS:
            raise ConfigError(describe_unknown_key(name, ARMS, kind="arm"))
    for name, least in (("tokens_per_kind", 32), ("window", 32), ("rows_per_step", 1)):
        if getattr(args, name) < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} must be at least {least}, got {getattr(args, name)}.")
    return args


def start_arms(
    arms: Sequence[Arm], model: str, watcher: Watcher
) -> tuple[Engines, dict[str, dict[str, Any]]]:
    """Return the engines that could be started, and the reason of each that could not."""
    engines: Engines = {}
    failures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="forerun-accuracy-") as folder:
        float_weights: Path | None = None
        if any(arm.needs_float for arm in arms):
            watcher.note("writing the weights in bfloat16")
            float_weights = write_float_weights(resolve_model_path(model), Path(folder))
        for arm in arms:
            watcher.note(f"loading {arm.name}")
            try:
                engines[arm.name] = start_arm(arm, model, float_weights)
            except ConfigError as error:
                failures[arm.name] = {"error": str(error)}
            watcher.advance()
    return engines, failures


def write_float_weights(path: Path, folder: Path) -> Path:
    """Return weights of a float type: a GGUF file's rounded to bfloat16, or the model folder."""
    if path.is_dir():
        return path
    target = folder / f"{path.stem}.bf16.gguf"
    write_bf16_gguf(path, target)
    return target


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything and return the result."""
    path = resolve_model_path(args.model)
    windows = build_windows(
        load_tokenizer(path), tokens_per_kind=args.tokens_per_kind, length=args.window
    )
    conversations = read_code_prompts(args.prompts) if args.prompts > 0 else []
    arms = [REFERENCE, *(ARMS[name] for name in args.arms)]
    num_parts = len(windows) + len(arms) * (2 if conversations else 1)
    with show_progress(num_parts) as watcher:
        engines, failures = start_arms(arms, args.model, watcher)
        if REFERENCE.name in failures:
            raise ConfigError(failures[REFERENCE.name]["error"])
        measures = read_windows(windows, engines, args.rows_per_step, watcher)
        answers = ask(conversations, engines, args.max_tokens, watcher)
    reference = measures[REFERENCE.name]
    figures = {
        arm.name: {"info": engines[arm.name].info}
        | describe_arm(arm, measures[arm.name], reference)
        for arm in arms
        if arm.name in engines
    }
    return {
        "benchmark": "accuracy",
        "model": args.model,
        "window": args.window,
        "rows_per_step": args.rows_per_step,
        "text": count_tokens(windows),
        "num_tokens": sum(window.num_scored for window in windows),
        "arms": figures | failures,
        "num_prompts": len(conversations),
        "max_tokens": args.max_tokens,
        "outputs": describe_outputs(answers),
        "provenance": collect_provenance(),
    }


def read_windows(
    windows: Sequence[Window], engines: Engines, rows_per_step: int, watcher: Watcher
) -> dict[str, dict[str, RowMeasures]]:
    """Read all windows with all arms; return the measures by arm and kind of text."""
    comparison = Comparison(engines, rows_per_step)
    for index, window in enumerate(windows, 1):
        watcher.note(f"window {index} of {len(windows)} ({window.kind})")
        comparison.read(window)
        watcher.advance()
    return comparison.join()


def ask(
    conversations: Sequence[Any], engines: Engines, max_tokens: int, watcher: Watcher
) -> dict[str, list[TokenIds]]:
    """Return every arm's greedy answers; none if there is nothing to ask."""
    answers = {}
    for name, llm in engines.items() if conversations else ():
        watcher.note(f"answers of {name}")
        answers[name] = generate(llm, conversations, max_tokens)
        watcher.advance()
    return answers


def show(result: Mapping[str, Any]) -> None:
    """Print the tables, every failure, and the JSON line."""
    console = Console()
    # Where stdout is no terminal, rich would assume 80 columns and fold the figures.
    console.width = max(console.width, _MIN_COLUMNS)
    console.print(build_distribution_table(result))
    if result["outputs"]:
        console.print(build_output_table(result))
    for line in build_notes(result):
        console.print(line, markup=False, highlight=False)
    sys.stdout.write(json.dumps(result) + "\n")


def main() -> int:
    """Run the benchmark from the command line; returns the exit code."""
    configure_logging("accuracy")
    try:
        show(run(parse_arguments()))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(main())
