"""Code prompts: small tasks in many languages, Python functions to complete, code to discuss."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from typing import Any

from forerun.data.mixture.sources import Documents

_LANGUAGES = {
    "bash": "Bash",
    "cpp": "C++",
    "csharp": "C#",
    "javascript": "JavaScript",
    "matlab": "MATLAB",
    "php": "PHP",
    "typescript": "TypeScript",
}
_MAX_CODE_CHARS = 900
_ABOUT_CODE = (
    "Explain what this {language} code does.",
    "Explain this {language} code step by step.",
    "Add comments to this {language} code.",
    "Which errors could occur in this {language} code? Suggest improvements.",
    "What are the time and space complexity of this {language} code?",
    "Rewrite this {language} code so that it is easier to read.",
    "Write unit tests for this {language} code.",
    "Translate this {language} code to {other}.",
)
_TASKS = (
    "{task} Use {language}.",
    "{task} Write it in {language}.",
    "In {language}: {task}",
    "{task} The solution should be in {language}. Explain it briefly.",
    "{task} Answer with {language} code only.",
)


def ask_to_complete(source: str) -> str:
    """Return the request to complete a Python function whose head is given."""
    return f"Complete this Python function.\n\n```python\n{source.rstrip()}\n```"


def make_language_tasks(docs: Documents, seed: str) -> Iterator[tuple[str, str]]:
    """Yield small programming tasks, each in every language."""
    rng = random.Random(seed)
    for doc in docs.read("mt_mbpp_"):
        name = _name_language(doc)
        text = rng.choice(_TASKS).format(task=doc["text"].strip(), language=name)
        yield f"{doc['language']}-{doc['task_id']}", text
    for doc in docs.read("codex_mbpp/"):
        example = doc["test_list"][0]
        yield f"tests-{doc['task_id']}", f"{doc['text']} Your code should pass: `{example}`"


def _name_language(doc: dict[str, Any]) -> str:
    language: str = doc["language"]
    return _LANGUAGES.get(language, language.capitalize())


def make_code_questions(docs: Documents, seed: str) -> Iterator[tuple[str, str]]:
    """Yield questions about a piece of code."""
    rng = random.Random(seed)
    for doc in docs.read("mt_mbpp_"):
        code = "\n".join(line.rstrip() for line in doc["code"].expandtabs(4).splitlines())
        if len(code) > _MAX_CODE_CHARS:
            continue
        other = rng.choice(["Python", "Java", "JavaScript", "C", "Go", "Rust"])
        question = rng.choice(_ABOUT_CODE).format(language=_name_language(doc), other=other)
        yield (
            f"{doc['language']}-{doc['task_id']}",
            f"{question}\n\n```{doc['language']}\n{code}\n```",
        )


def make_completions(docs: Documents) -> Iterator[tuple[str, str]]:
    """Yield Python functions to complete from a task, with and without examples."""
    for doc in docs.read("codex_mbpp/"):
        head = _find_head(doc)
        if head is None:
            continue
        text = _turn_into_docstring(doc["text"])
        examples = "".join(_show_example(test) for test in doc["test_list"][:2])
        yield f"{doc['task_id']}-plain", ask_to_complete(f'{head}\n    """{text}"""')
        yield (
            f"{doc['task_id']}-examples",
            ask_to_complete(f'{head}\n    """{text}\n{examples}    """'),
        )


def _find_head(doc: dict[str, Any]) -> str | None:
    """Return the def line of the function that the tests call."""
    called = re.search(r"assert\s+\(?(\w+)\(", doc["test_list"][0])
    heads = re.findall(r"^def .*:", doc["code"], re.MULTILINE)
    wanted = f"def {called[1]}(" if called else "def "
    return next((head for head in heads if head.replace(" (", "(").startswith(wanted)), None)


def _turn_into_docstring(text: str) -> str:
    body = re.sub(r"^Write a (python )?function (to|that|which) ", "", text.strip(), flags=re.I)
    return body[0].upper() + body[1:]


def _show_example(test: str) -> str:
    """Turn `assert f(x) == y` into a doctest line; return nothing if it has another form."""
    try:
        statement = ast.parse(test.strip()).body[0]
    except SyntaxError:
        return ""
    match statement:
        case ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[value])):
            return f"    >>> {ast.unparse(call)}\n    {ast.unparse(value)}\n"
    return ""


def make_snippets(docs: Documents) -> Iterator[tuple[str, str]]:
    """Yield very short Python functions to complete."""
    for doc in docs.read("basic_skills_coding/"):
        if doc["question"].startswith("def "):
            lines = doc["question"].rstrip().splitlines()
            body = lines[:-1] if lines[-1].strip() == "return" else lines
            yield doc["id"], ask_to_complete("\n".join(body))
