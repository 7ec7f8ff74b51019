"""Chat prompts: our own requests about topics from packages, and questions asked as they are."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

from forerun.data.mixture.chat_templates import CHAT_TEMPLATES
from forerun.data.mixture.chat_topics import TOPICS
from forerun.data.mixture.passages import read_passages
from forerun.data.mixture.sources import Documents
from forerun.data.mixture.templates import fill_template

_EXCERPT_CHARS = 700


def make_requests(docs: Documents, seed: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield `count` requests, the templates in turn."""
    rng = random.Random(seed)
    words = TOPICS | _read_topics(docs)
    for index, template in enumerate(islice(cycle(CHAT_TEMPLATES), count)):
        yield str(index), fill_template(template, words, rng)


def _read_topics(docs: Documents) -> dict[str, list[str]]:
    excerpts = [text for _, text, _ in read_passages(docs) if len(text) <= _EXCERPT_CHARS]
    titles = {*_read_titles(docs), *_read_names(docs)}
    terms = {doc["correct_answer"].strip().lower() for doc in docs.read("sciq/")}
    return {
        "title": sorted(title for title in titles if "List of" not in title),
        "science": sorted(term for term in terms if term.replace(" ", "").isalpha()),
        "goal": [text for _, text in make_how_to_questions(docs)],
        "passage": excerpts,
    }


def _read_titles(docs: Documents) -> Iterator[str]:
    for doc in docs.read("boolq/"):
        yield doc["query"].split(" -- ")[0]
    for doc in docs.read("squad/"):
        yield doc["title"].replace("_", " ")


def _read_names(docs: Documents) -> Iterator[str]:
    """Yield the answers of quiz questions that are names."""
    for doc in docs.read("jeopardy/"):
        if re.fullmatch(r"[A-Z][\w.'-]+( [A-Z][\w.'-]+)+", doc["answer"]):
            yield doc["answer"]


def make_how_to_questions(docs: Documents) -> Iterator[tuple[str, str]]:
    """Yield how-to questions: titles of guides and everyday goals."""
    titles = (_read_guide_title(doc) for doc in docs.read("hellaswag/"))
    goals = (_read_goal(doc) for doc in docs.read("piqa/"))
    distinct = dict.fromkeys(text for text in (*titles, *goals) if text)
    return ((str(index), text) for index, text in enumerate(distinct))


def _read_guide_title(doc: dict[str, Any]) -> str:
    match = re.match(r"[^:]*: How to ([^.?!]{8,80})\.", doc["query"])
    return f"How do I {match[1]}?" if match else ""


def _read_goal(doc: dict[str, Any]) -> str:
    goal: str = doc["goal"].strip(" .,:")
    if goal.endswith("?"):
        return goal[0].upper() + goal[1:]
    match = re.fullmatch(r"To ([\w' -]{8,80})", goal)
    return f"What is the best way to {match[1]}?" if match else ""


def make_plain_questions(docs: Documents) -> Iterator[tuple[str, str]]:
    """Yield questions of fact, as search engines and school books have them."""
    for index, doc in enumerate(docs.read("naturalqs_open/")):
        yield f"search-{index}", doc["question"].strip().rstrip("?").capitalize() + "?"
    for index, doc in enumerate(docs.read("boolq/")):
        question = doc["query"].rsplit("Question:", 1)[1].removesuffix("Answer:").strip()
        yield f"yes-no-{index}", question[0].upper() + question[1:]
    for index, doc in enumerate(docs.read("sciq/")):
        yield f"science-{index}", f"{doc['question']} Explain your answer."
    for index, doc in enumerate(docs.read("jeopardy/")):
        clue = doc["query"].rsplit("Question:", 1)[1].removesuffix("Answer:").strip()
        yield f"quiz-{index}", f"Who or what is meant, and why? {clue}"
