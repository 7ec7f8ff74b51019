"""`forerun generate PROMPT`: one answer, streamed to the terminal by an engine in this process."""

from __future__ import annotations

import argparse
import os
import sys
import time
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forerun.commands.explain import StepExplainer
from forerun.commands.flags import (
    Parser,
    add_engine_flags,
    collect,
    collect_engine_options,
    unwrap_optional,
)
from forerun.commands.progress import LoadingBar
from forerun.core import SamplingParams

if TYPE_CHECKING:
    from forerun.core import RequestOutput
    from forerun.engine.llm import LLM
    from forerun.engine.messages import StepStats

DEFAULT_MAX_TOKENS = 512
_SAMPLING_FLAGS = {
    "max_tokens": f"most tokens of the answer (default: {DEFAULT_MAX_TOKENS})",
    "temperature": "0 is greedy (default: what the model recommends, or 1.0)",
    "top_p": "keep the likeliest tokens up to this probability",
    "top_k": "keep this many of the likeliest tokens",
    "min_p": "drop tokens less likely than this share of the likeliest",
    "seed": "make the answer repeatable",
}


def add_parser(subparsers: Any) -> Parser:
    """Add the subcommand and return its parser."""
    parser: Parser = subparsers.add_parser("generate", help="stream one answer to the terminal")
    parser.add_argument("prompt", metavar="PROMPT", help="the message, or with --no-chat the text")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use the model's chat template (default: yes)",
    )
    parser.add_argument(
        "--stats", action="store_true", help="print acceptance and speed at the end"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print, step by step, what was drafted, verified and accepted, and what it cost",
    )
    hints = typing.get_type_hints(SamplingParams)
    for name, text in _SAMPLING_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        kind = unwrap_optional(hints[name])
        parser.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    add_engine_flags(parser)
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Load the model, stream the answer, and say how it went if asked."""
    given = {"max_tokens": DEFAULT_MAX_TOKENS, **collect(args, _SAMPLING_FLAGS)}
    SamplingParams(**given)  # refuse bad values before loading anything
    with LoadingBar() as bar:
        from forerun import LLM

        llm = LLM(progress=bar.update, **collect_engine_options(args))
    params = SamplingParams(**{**llm.tokenizer.generation_defaults, **given})
    is_chat = args.chat and llm.tokenizer.has_chat_template
    prompt = [{"role": "user", "content": args.prompt}] if is_chat else args.prompt
    if args.explain:
        llm.engine.on_trace = StepExplainer(llm.tokenizer, sys.stderr).write
    try:
        summary = stream_answer(llm, prompt, params, is_live=not args.explain)
    except BrokenPipeError:
        # Whoever read the answer has seen enough (`| head`). What is still buffered for them must
        # go elsewhere, or the interpreter complains about it when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if args.stats:
        sys.stderr.write(summary + "\n")
    return 0


def stream_answer(
    llm: LLM,
    prompt: str | Sequence[dict[str, str]],
    params: SamplingParams,
    *,
    is_live: bool = True,
) -> str:
    """Write the answer to stdout, as it comes or at the end; return the line for --stats."""
    started_s = time.perf_counter()
    first_s = None
    last: RequestOutput | None = None
    pieces: list[str] = []
    for output in llm.stream(prompt, params):
        first_s = first_s or time.perf_counter()
        pieces.append(output.text)
        if is_live:
            sys.stdout.write(output.text)
            sys.stdout.flush()
        last = output
    ended_s = time.perf_counter()
    sys.stdout.write("\n" if is_live else "".join(pieces) + "\n")
    assert last is not None, "an answer has at least one output"
    return describe_speed(
        num_tokens=last.num_output_tokens,
        first_token_s=(first_s or ended_s) - started_s,
        decode_s=ended_s - (first_s or ended_s),
        steps=llm.step_stats,
    )


def describe_speed(
    *, num_tokens: int, first_token_s: float, decode_s: float, steps: Sequence[StepStats]
) -> str:
    """Return tokens, speed after the first token, and what speculation did."""
    num_verifications = sum(s.num_spec_steps for s in steps)
    accepted = sum(s.num_accepted_tokens for s in steps)
    drafted = sum(s.num_draft_tokens for s in steps)
    text = f"{num_tokens} tokens, first after {first_token_s * 1000:.0f} ms"
    if decode_s > 0 and num_tokens > 1:
        text += f", then {(num_tokens - 1) / decode_s:.1f} tok/s"
    if num_verifications:
        text += (
            f"; accepted {accepted} of {drafted} drafted, "
            f"acceptance length {1 + accepted / num_verifications:.2f}"
        )
    return text
