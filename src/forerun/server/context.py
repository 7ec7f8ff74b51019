"""What every handler needs, in one frozen object that lives on the application. No torch."""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from forerun.errors import RequestError
from forerun.server.prometheus import ServerMetrics
from forerun.transport.async_engine import AsyncEngine


class ServerTokenizer(Protocol):
    """The part of the tokenizer the server uses."""

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters the model recommends."""
        ...

    @property
    def special_token_ids(self) -> Collection[int]:
        """Ids that `skip_special_tokens` leaves out of text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Return the prompt ids of a conversation."""
        ...

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerContext:
    """One model being served. `num_speculative_tokens` is 0 without a drafter."""

    engine: AsyncEngine
    tokenizer: ServerTokenizer
    metrics: ServerMetrics
    model_name: str
    num_speculative_tokens: int = 0
    api_key: str | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))


def get_context(request: Request) -> ServerContext:
    """Return the context of the application that serves this request."""
    context = request.app.state.context
    assert isinstance(context, ServerContext)
    return context


async def check_api_key(request: Request) -> None:
    """Refuse a request without the right bearer token."""
    expected = get_context(request).api_key
    if expected is None:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), expected.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise RequestError(
            "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
            status=401,
            code="invalid_api_key",
        )


def check_model(context: ServerContext, model: str | None) -> None:
    """Refuse a model this server does not serve; no model means the one it serves."""
    if model is not None and model != context.model_name:
        raise RequestError(
            f"model {model!r} does not exist here; this server serves {context.model_name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )
