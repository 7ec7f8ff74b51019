"""Renders chat templates the way Hugging Face's ecosystem expects, with jinja2 in a sandbox.

Templates come with the model; messages come from clients. Whatever goes wrong while rendering is a
RequestError on `messages`, because most templates use errors to say which conversations they take.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forerun.errors import RequestError

# What template code can raise on a conversation it was not written for.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks assistant text for training; here it is just text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _format_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the model's chat template is broken ({error}); use /v1/completions instead.",
                param="messages",
                code="chat_template_error",
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Return the prompt text; `variables` are further names the template may use."""
        names = {"tools": None, "documents": None, **variables}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except _RENDER_ERRORS as error:
            raise RequestError(
                f"the model's chat template does not take these messages: {error}.",
                param="messages",
                code="chat_template_error",
            ) from error


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # jinja2's own filter escapes HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _format_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the shape of OpenAI messages and turn lists of text parts into one text each."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError(
            "messages must be a non-empty list of objects with role and content.", param="messages"
        )
    return [_normalise_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _normalise_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content.", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(
            f"{where}.role must be a string such as system, user or assistant, got {role!r}.",
            param="messages",
        )
    content = message.get("content")
    if isinstance(content, list):
        parts = [_get_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, "
            f"got {type(content).__name__}.",
            param="messages",
        )
    return {**message, "content": content}


def _get_part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"{where} has type {kind!r}; this server takes only parts of type 'text'.",
            param="messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, got {text!r}.", param="messages")
    return text
