"""The two kinds of user error.

`ConfigError` ends start-up (exit code 2, one sentence). `RequestError` ends one request: the server
turns it into a 4xx or 5xx in OpenAI's error shape; the engine survives it. Programmer errors are
`assert`s, never these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A start-up mistake of the user: say what was given, what is allowed, what to do."""


class RequestError(ValueError):
    """A mistake in, or a failure of, one request.

    `status` is the HTTP status, `param` the request field at fault (None when no single field is),
    `code` a stable machine-readable word. `retry_after_s` becomes a Retry-After header.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.message, self.status, self.param, self.code, self.retry_after_s)
        return (_rebuild_request_error, fields)


def _rebuild_request_error(
    message: str, status: int, param: str | None, code: str | None, retry_after_s: int | None
) -> RequestError:
    """Restore a RequestError on the other side of a process boundary."""
    return RequestError(message, status=status, param=param, code=code, retry_after_s=retry_after_s)


def describe_unknown_key(given: str, allowed: Iterable[str], *, kind: str) -> str:
    """Return the sentence for an unknown key, naming the nearest valid one."""
    names = sorted(allowed)
    nearest = difflib.get_close_matches(given, names, n=1, cutoff=0.0)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"unknown {kind} {given!r}{hint} Valid: {', '.join(names)}."
