"""`forerun train generate`: the target answers prompts, and its hidden states are kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from forerun.commands.flags import Parser
from forerun.config import DEFAULT_MODEL, QUANTIZATIONS, parse_bytes
from forerun.errors import ConfigError
from forerun.logs import configure_logging, get_logger

if TYPE_CHECKING:
    from forerun.training.answers.generation import GenerationProgress, GenerationSettings

logger = get_logger(__name__)
DEFAULT_PROMPTS = "default"
_LOG_EVERY_S = 60.0


def add_parser(stages: Any) -> Parser:
    """Add the stage and return its parser."""
    parser: Parser = stages.add_parser(
        "generate", help="let the target answer prompts; keep its hidden states"
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="the target, as serve takes it")
    add("--output", type=Path, required=True, metavar="FOLDER", help="where the answers go")
    add(
        "--prompts",
        default=DEFAULT_PROMPTS,
        metavar="FILE",
        help='JSON lines of {"prompt": ...} or {"messages": ...}, or "default" for a set built '
        "from published packages",
    )
    add("--num-prompts", type=int, help="take only the first so many prompts")
    add("--max-tokens", type=int, default=256, help="longest answer (default: 256)")
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 0.8],
        help="each prompt gets one of these (default: 0 0.8)",
    )
    add("--top-p", type=float, default=0.95, help="for sampled answers (default: 0.95)")
    add("--concurrency", type=int, default=128, help="answers at once (default: 128)")
    add("--shard-prompts", type=int, default=512, help="prompts per file (default: 512)")
    add("--target-layer-ids", type=int, nargs="+", help="layers to tap (default: five, evenly)")
    add("--quantization", default="auto", choices=QUANTIZATIONS, help="as serve takes it")
    add("--max-disk", metavar="SIZE", help="most space to use, such as 20G (default: all but 1G)")
    parser.set_defaults(run=run, flags_parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Generate what is missing; print what there is in the end."""
    configure_logging("train")
    limit = None if args.max_disk is None else parse_bytes("--max-disk", args.max_disk)
    prompts = read_prompts(args.prompts, args.num_prompts)
    settings = _build_settings(args)
    from forerun.training.answers.generation import Generation

    started_s = time.perf_counter()
    with GenerationBar() as bar:
        generation = Generation(settings, prompts, bar.update)
        generation.check_disk(limit)
        logger.info(
            "%d of %d prompts to answer, at most %.1f GB in %s",
            generation.progress.num_prompts - generation.progress.num_done,
            generation.progress.num_prompts,
            generation.needed_bytes / 1e9,
            settings.output,
        )
        generation.run()
    done, seconds = generation.progress, time.perf_counter() - started_s
    summary = {
        "output": str(settings.output),
        "num_prompts": done.num_done,
        "num_rows": done.num_rows,
        "rows_per_s": round(done.num_rows / seconds, 1),
    }
    sys.stdout.write(json.dumps(summary) + "\n")
    return 0


def read_prompts(source: str, limit: int | None) -> list[dict[str, Any]]:
    """Return prompts with ids, messages or text; raises ConfigError."""
    if limit is not None and limit < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {limit}.")
    if source == DEFAULT_PROMPTS:
        from forerun.data.training_prompts import build_training_prompts

        return build_training_prompts(logger.info)[:limit]
    from forerun.bench.workload import read_rows

    rows = read_rows(Path(source))[:limit]
    ids = [row.row_id for row in rows]
    if len(set(ids)) < len(ids):
        repeated = next(row_id for row_id in ids if ids.count(row_id) > 1)
        raise ConfigError(f"{source}: id {repeated!r} occurs more than once; ids must differ.")
    return [
        {"id": row.row_id, ("messages" if row.is_chat else "prompt"): row.prompt} for row in rows
    ]


def _build_settings(args: argparse.Namespace) -> GenerationSettings:
    from forerun.core import SamplingParams
    from forerun.training.answers.generation import GenerationSettings

    for temperature in args.temperatures:
        SamplingParams(temperature=temperature, top_p=args.top_p, max_tokens=args.max_tokens)
    for name in ("concurrency", "shard_prompts"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1, got {getattr(args, name)}.")
    layers = args.target_layer_ids
    return GenerationSettings(
        model=args.model,
        output=args.output,
        max_tokens=args.max_tokens,
        temperatures=tuple(args.temperatures),
        top_p=args.top_p,
        concurrency=args.concurrency,
        shard_prompts=args.shard_prompts,
        target_layer_ids=None if layers is None else tuple(layers),
        quantization=args.quantization,
    )


class GenerationBar:
    """Progress on a terminal; a line a minute elsewhere."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not self._is_shown,
        )
        self._task = self._bar.add_task("answers", total=None, speed="")
        self._started_s = self._last_s = time.perf_counter()

    def __enter__(self) -> GenerationBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: GenerationProgress) -> None:
        """Show how far it is."""
        now = time.perf_counter()
        speed = f"{progress.num_rows / (now - self._started_s):.0f} rows/s"
        self._bar.update(
            self._task, completed=progress.num_done, total=progress.num_prompts, speed=speed
        )
        if not self._is_shown and now - self._last_s > _LOG_EVERY_S:
            self._last_s = now
            logger.info("%d of %d prompts, %s", progress.num_done, progress.num_prompts, speed)
