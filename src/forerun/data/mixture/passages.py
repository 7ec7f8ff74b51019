"""Prompts about a passage: summaries and questions to answer from the text.

Passages come from encyclopedia articles, news about sports and history, and research abstracts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from forerun.data.mixture.sources import Documents

_MIN_CHARS = 250
_MAX_CHARS = 1200

_SUMMARIES = (
    "Summarise this text in three sentences.",
    "Summarise this text in three sentences.",
    "Summarise this text in one sentence.",
    "Summarise the following passage in two or three sentences.",
    "Give the key points of this text as a short list.",
    "What is this text about? Answer briefly.",
    "Summarise this text for somebody who knows nothing about the subject.",
    "Write a short abstract of this text.",
)
_QUESTIONS = (
    "Answer the question from the text.\n\n{passage}\n\nQuestion: {question}",
    "{passage}\n\n{question}",
    "Read the text and answer in a full sentence.\n\n{passage}\n\n{question}",
    "{question} Explain with the help of this text.\n\n{passage}",
)


def read_passages(docs: Documents) -> list[tuple[str, str, str]]:
    """Return (id, passage, question) of every passage that is neither tiny nor cut to nothing."""
    rows = [*_read_squad(docs), *_read_boolq(docs), *_read_drop(docs), *_read_abstracts(docs)]
    distinct = {passage: (row_id, question) for row_id, passage, question in reversed(rows)}
    return [
        (row_id, _cut(passage), question)
        for passage, (row_id, question) in sorted(distinct.items())
        if len(passage) >= _MIN_CHARS
    ]


def _cut(passage: str) -> str:
    """Cut a long passage after the last sentence that fits."""
    if len(passage) <= _MAX_CHARS:
        return passage
    head, stop, _ = passage[:_MAX_CHARS].rpartition(". ")
    return head + stop.strip() if len(head) >= _MIN_CHARS else passage[:_MAX_CHARS]


def _read_squad(docs: Documents) -> Iterator[tuple[str, str, str]]:
    for doc in docs.read("squad/"):
        text, question = doc["query"].removesuffix("\nAnswer:").rsplit("\nQuestion: ", 1)
        yield f"article-{doc['id']}", text.split("\nBackground: ", 1)[1], question


def _read_boolq(docs: Documents) -> Iterator[tuple[str, str, str]]:
    for doc in docs.read("boolq/"):
        text, question = doc["query"].removesuffix("\nAnswer:").rsplit("\nQuestion: ", 1)
        yield f"entry-{doc['idx']}", text.split(" -- ", 1)[1], question[0].upper() + question[1:]


def _read_drop(docs: Documents) -> Iterator[tuple[str, str, str]]:
    for doc in docs.read("drop/"):
        question = doc["query"].removesuffix("\nAnswer:").rsplit("\nQuestion: ", 1)[1]
        yield f"report-{doc['query_id']}", doc["passage"].strip(), question


def _read_abstracts(docs: Documents) -> Iterator[tuple[str, str, str]]:
    for doc in docs.read("sciriff_yesno/"):
        yield f"abstract-{doc['id']}", " ".join(doc["context"].split()), doc["question"]


def make_summaries(docs: Documents, seed: str) -> Iterator[tuple[str, str]]:
    """Yield one request for a summary per passage."""
    rng = random.Random(seed)
    for row_id, passage, _ in read_passages(docs):
        yield row_id, f"{rng.choice(_SUMMARIES)}\n\n{passage}"


def make_passage_questions(docs: Documents, seed: str) -> Iterator[tuple[str, str]]:
    """Yield one question about each passage, whose end may be cut off with the answer."""
    rng = random.Random(seed)
    for row_id, passage, question in read_passages(docs):
        yield row_id, rng.choice(_QUESTIONS).format(passage=passage, question=question)
