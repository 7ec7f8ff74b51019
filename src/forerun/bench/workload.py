"""What is sent and when: rows of a data set, and arrival times.

A `Row` is one request: chat messages, a text, or token ids, and how many tokens it may produce.
The same configuration and seed give the same rows in the same order, on any machine, which is what
lets two servers be compared request by request.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.bench.options import BenchConfig
from forerun.data import build_prompt_set
from forerun.errors import ConfigError

DEFAULT_MAX_TOKENS = 128
# Ids every tokenizer in use has, clear of the control tokens at both ends of a vocabulary.
RANDOM_TOKEN_IDS = range(1000, 8000)
_EXAMPLE = '{"prompt": "Hello"} or {"messages": [{"role": "user", "content": "Hello"}]}'

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One request to send. `messages` goes to chat, a `str` or ids to completions."""

    row_id: str
    category: str
    prompt: Messages | str | list[int]
    max_tokens: int

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation."""
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)


def build_workload(config: BenchConfig, progress: Callable[[str], None] | None = None) -> list[Row]:
    """Return the rows of a run in sending order; raises ConfigError."""
    rng = random.Random(config.seed)
    if config.dataset_name == "random":
        rows = _build_random_rows(config, rng)
    else:
        rows = load_rows(config, progress)
        if not config.disable_shuffle:
            rng.shuffle(rows)
    rows = _take(rows, config.num_prompts or len(rows), oversample=config.oversample)
    if config.custom_output_len is not None:
        rows = [replace(row, max_tokens=config.custom_output_len) for row in rows]
    return rows


def load_rows(config: BenchConfig, progress: Callable[[str], None] | None = None) -> list[Row]:
    """Return a named data set in its own order; raises ConfigError."""
    if config.dataset_path is not None:
        return read_rows(Path(config.dataset_path))
    sources = build_prompt_set(config.dataset_name, progress)
    return [parse_row(source, number) for number, source in enumerate(sources, 1)]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a JSON-lines file; raises ConfigError naming the line at fault."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the data set {path}: {reason}.") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, source: str) -> list[Row]:
    """Return the rows of JSON lines; raises ConfigError naming the line at fault."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(parse_row(json.loads(line), number))
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ConfigError(f"{source}, line {number}: {reason}. A row is {_EXAMPLE}.") from error
    if not rows:
        raise ConfigError(f"{source} holds no rows; a row is {_EXAMPLE}.")
    return rows


def parse_row(value: Any, number: int) -> Row:
    """Return a row from its JSON value; raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a row must be a JSON object")
    if ("prompt" in value) == ("messages" in value):
        raise ValueError("a row needs either prompt or messages")
    prompt = value["messages"] if "messages" in value else value["prompt"]
    check = _check_messages if "messages" in value else _check_prompt
    check(prompt)
    max_tokens = value.get("max_tokens", value.get("output_tokens", DEFAULT_MAX_TOKENS))
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise ValueError(f"max_tokens must be a whole number above 0, got {max_tokens!r}")
    return Row(
        row_id=str(value.get("id", f"row-{number}")),
        category=str(value.get("category", "all")),
        prompt=prompt,
        max_tokens=max_tokens,
    )


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list that is not empty")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise ValueError("each message needs role and content")


def _check_prompt(prompt: Any) -> None:
    is_text = isinstance(prompt, str) and bool(prompt)
    is_ids = isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)
    if not is_text and not is_ids:
        raise ValueError("prompt must be a text or a list of token ids, and not empty")


def _build_random_rows(config: BenchConfig, rng: random.Random) -> list[Row]:
    count = config.num_prompts or 100
    return [
        Row(
            row_id=f"random-{index}",
            category="random",
            prompt=rng.choices(RANDOM_TOKEN_IDS, k=config.random_input_len),
            max_tokens=config.random_output_len,
        )
        for index in range(count)
    ]


def _take(rows: list[Row], count: int, *, oversample: bool) -> list[Row]:
    """Return `count` rows, going round again with new ids where allowed."""
    if count <= len(rows):
        return rows[:count]
    if not oversample:
        raise ConfigError(
            f"--num-prompts is {count}, but the data set has {len(rows)} rows; lower it or allow "
            "--oversample."
        )
    rounds = [
        replace(row, row_id=f"{row.row_id}#{turn}") if turn else row
        for turn in range(math.ceil(count / len(rows)))
        for row in rows
    ]
    return rounds[:count]


def build_warmup_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """Return rows shaped like the run's whose prompts share no prefix with them, nor each other."""
    return [
        replace(row, row_id=f"warm-up-{index}", prompt=_alter(row.prompt, index))
        for index, row in ((index, rows[index % len(rows)]) for index in range(count))
    ]


def _alter(prompt: Messages | str | list[int], index: int) -> Messages | str | list[int]:
    if isinstance(prompt, str):
        return f"({index}) {prompt}"
    first = prompt[0]
    if isinstance(first, dict):
        altered = {"role": first["role"], "content": f"({index}) {first['content']}"}
        return [altered, *(message for message in prompt[1:] if isinstance(message, dict))]
    ids = [token_id for token_id in prompt if isinstance(token_id, int)]
    return [RANDOM_TOKEN_IDS[index % len(RANDOM_TOKEN_IDS)], *ids[1:]]


def build_arrivals(count: int, request_rate: float, seed: int) -> list[float]:
    """Return when each request should be sent, in seconds from the start of the run.

    Poisson arrivals have exponential gaps with mean 1 / rate; an infinite rate means all at once.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    rng = random.Random(seed)
    arrivals: list[float] = []
    now_s = 0.0
    for _ in range(count):
        arrivals.append(now_s)
        now_s += rng.expovariate(request_rate)
    return arrivals
