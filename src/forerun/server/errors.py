"""From whatever goes wrong to OpenAI's error shape, and from a body to a checked model.

Every refusal names the field at fault. Bodies are parsed here rather than by the framework, so that
malformed JSON, unsupported fields, unknown fields and wrong types all answer alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forerun.errors import RequestError, describe_unknown_key
from forerun.server.protocol import UNION_TYPES, UNSUPPORTED_FIELDS, ChatMessage, StreamOptions

Body = TypeVar("Body", bound=BaseModel)

_NESTED_MODELS: dict[str, type[BaseModel]] = {
    "messages": ChatMessage,
    "stream_options": StreamOptions,
}
# pydantic names the branches of a union in an error's location; they are no part of a field's path.
_UNION_BRANCH = re.compile(r"^(str|int|float|bool|list\[.*\]|TextPart)$")


def error_body(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object."""
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: RequestError) -> JSONResponse:
    """Return the HTTP answer for a refused or failed request."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of a route answer in OpenAI's shape."""

    async def on_request_error(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        response = error_response(RequestError(message, status=error.status_code))
        response.headers.update(error.headers or {})  # 405 must say what is allowed
        return response

    async def on_any_error(_: Request, error: Exception) -> JSONResponse:
        return error_response(internal_error(error))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_any_error)


def internal_error(error: Exception) -> RequestError:
    """Return the 500 for an exception nobody foresaw."""
    message = f"internal error: {type(error).__name__}: {error}"
    return RequestError(message, status=500, code="internal_error")


async def parse_body(request: Request, model: type[Body]) -> Body:
    """Return the checked body; raises RequestError naming the field at fault."""
    try:
        value = from_json(await request.body(), allow_inf_nan=False)
    except ClientDisconnect as error:
        raise RequestError("the client hung up while sending the body.", status=499) from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object.", code="invalid_json")
    known = _take_known(value, model)
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _describe(error, model) from error


def _take_known(value: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Return the fields of the model; refuse the others unless they ask for nothing."""
    known = {}
    for name, given in value.items():
        if name in model.model_fields:
            known[name] = given
            continue
        if name not in UNSUPPORTED_FIELDS:
            message = describe_unknown_key(name, model.model_fields, kind="field")
            raise RequestError(message, param=name, code="unknown_field")
        if given not in UNSUPPORTED_FIELDS[name]:
            message = f"{name} is not supported by this server; leave it out."
            raise RequestError(message, param=name, code="unsupported_field")
    return known


def _describe(error: ValidationError, model: type[BaseModel]) -> RequestError:
    """Turn the first complaint into one sentence that names the field."""
    first = error.errors(include_url=False)[0]
    path = [part for part in first["loc"] if not _UNION_BRANCH.match(str(part))]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return RequestError(cause.message, param=_format_path([*path, cause.param or ""]))
    param = _format_path(path)
    if first["type"] == "missing":
        return RequestError(f"{param} is missing.", param=param, code="missing_field")
    name = str(path[-1])
    if first["type"] == "extra_forbidden":
        allowed = _NESTED_MODELS.get(str(path[0]), model).model_fields
        message = f"in {path[0]}: " + describe_unknown_key(name, allowed, kind="field")
        return RequestError(message, param=param, code="unknown_field")
    is_union = len(path) < len(first["loc"])
    wanted = UNION_TYPES[name] if is_union and name in UNION_TYPES else first["msg"]
    wanted = wanted.removeprefix("Input should be ")
    return RequestError(
        f"{param} must be {wanted}, got {_shorten(first['input'])}.",
        param=param,
        code="invalid_value",
    )


def _format_path(path: Sequence[int | str]) -> str:
    """Return `messages[0].content` for ("messages", 0, "content")."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status < 500:
        return "invalid_request_error"
    return "service_unavailable" if status == 503 else "server_error"
