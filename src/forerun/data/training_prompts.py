"""The default prompts for training a drafter: 19,000 requests whose answers the target writes.

1,000 more of the same mixture are kept apart, to calibrate a drafter on what it never saw.

The mixture is a table of kinds. Every kind offers more prompts than are taken; its own are chosen
by a hash of their ids, and the kinds are interleaved evenly, so that any prefix of the result is a
small version of the whole. Prompts that share text with an evaluation set are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from forerun.data.mixture import chat, code, passages
from forerun.data.mixture.library_functions import make_library_functions
from forerun.data.mixture.overlap import OverlapFilter, normalise
from forerun.data.mixture.sources import Documents, fetch_sources
from forerun.data.mixture.word_problems import make_word_problems
from forerun.data.prompt_sets import Row, read_evaluation_texts

_SEED = "0"
# Answers are what a drafter learns from: longer prompts would only cost time.
_MAX_CHARS = 1600
NUM_CALIBRATION = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One ingredient: how many prompts of it to take, and where they come from."""

    name: str
    category: str
    count: int
    make: Callable[[Documents], Iterable[tuple[str, str]]]


def _make_competition_problems(docs: Documents) -> Iterator[tuple[str, str]]:
    for number, doc in enumerate(docs.read("minerva_math_")):
        if "[asy]" not in doc["problem"]:
            yield str(number), doc["problem"].strip()


def _make_sums(docs: Documents) -> Iterator[tuple[str, str]]:
    for doc in docs.read("basic_skills_arithmetic/"):
        term = doc["question"].removesuffix("=").strip()
        yield doc["id"], f"What is {term}? Show the steps."


KINDS = (
    Kind(
        name="request",
        category="chat",
        count=4300,
        make=partial(chat.make_requests, seed=_SEED, count=6000),
    ),
    Kind(name="how-to", category="chat", count=1200, make=chat.make_how_to_questions),
    Kind(name="question", category="chat", count=1500, make=chat.make_plain_questions),
    Kind(
        name="word-problem",
        category="math",
        count=3300,
        make=lambda _docs: make_word_problems(_SEED, 4000),
    ),
    Kind(name="competition", category="math", count=1400, make=_make_competition_problems),
    Kind(name="sum", category="math", count=300, make=_make_sums),
    Kind(
        name="task",
        category="code",
        count=2300,
        make=partial(code.make_language_tasks, seed=_SEED),
    ),
    Kind(name="completion", category="code", count=850, make=code.make_completions),
    Kind(name="snippet", category="code", count=750, make=code.make_snippets),
    Kind(
        name="library",
        category="code",
        count=1100,
        make=lambda _docs: make_library_functions(),
    ),
    Kind(
        name="about-code",
        category="code",
        count=1000,
        make=partial(code.make_code_questions, seed=_SEED),
    ),
    Kind(
        name="summary",
        category="summarise",
        count=1300,
        make=partial(passages.make_summaries, seed=_SEED),
    ),
    Kind(
        name="reading",
        category="summarise",
        count=700,
        make=partial(passages.make_passage_questions, seed=_SEED),
    ),
)


def build_training_prompts(progress: Callable[[str], None] | None = None) -> list[Row]:
    """Return the prompts, fetching their packages the first time; raises ConfigError."""
    return _build_mixture(progress)[:-NUM_CALIBRATION]


def build_calibration_prompts(progress: Callable[[str], None] | None = None) -> list[Row]:
    """Return the prompts that are kept out of training; raises ConfigError."""
    return _build_mixture(progress)[-NUM_CALIBRATION:]


def _build_mixture(progress: Callable[[str], None] | None) -> list[Row]:
    docs = Documents(fetch_sources(progress))
    overlap = OverlapFilter(read_evaluation_texts(progress))
    placed: list[tuple[float, str, Row]] = []
    for kind in KINDS:
        rows = _choose_rows(kind, docs, overlap)
        placed += (((i + 0.5) / len(rows), kind.name, row) for i, row in enumerate(rows))
    return [row for _, _, row in sorted(placed, key=lambda entry: entry[:2])]


def _choose_rows(kind: Kind, docs: Documents, overlap: OverlapFilter) -> list[Row]:
    """Return the kind's rows in the order of their hashes, without repetitions."""
    distinct: dict[str, tuple[str, str]] = {}
    for row_id, text in kind.make(docs):
        distinct.setdefault(normalise(text), (f"{kind.name}-{row_id}", text))
    rows: list[Row] = []
    for row_id, text in sorted(distinct.values(), key=_hash_row):
        if len(rows) == kind.count:
            break
        if len(text) <= _MAX_CHARS and overlap.is_apart(text):
            messages = [{"role": "user", "content": text}]
            rows.append({"id": row_id, "category": kind.category, "messages": messages})
    return rows


def _hash_row(row: tuple[str, str]) -> str:
    return hashlib.sha256(f"{_SEED} {row[0]}".encode()).hexdigest()
