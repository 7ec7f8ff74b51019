"""The FastAPI application: routes, authentication, and the small endpoints.

/health says that the process lives, /ready that a request sent now would be served. These two and
/metrics need no API key; everything else does when one is set. No torch.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import forerun
from forerun.errors import RequestError
from forerun.server.chat import create_chat_completion, encode_messages
from forerun.server.completions import create_completion
from forerun.server.context import ServerContext, check_api_key, check_model, get_context
from forerun.server.errors import install_error_handlers, parse_body
from forerun.server.protocol import DetokenizeBody, TokenizeBody


def build_app(context: ServerContext) -> FastAPI:
    """Return the application that serves one engine. The caller starts and stops the engine."""
    app = FastAPI(title="Forerun", version=forerun.__version__, openapi_url=None)
    app.state.context = context
    context.engine.add_stats_listener(context.metrics.on_step)
    install_error_handlers(app)
    app.include_router(_build_open_router())
    app.include_router(_build_api_router())
    return app


def _build_open_router() -> APIRouter:
    router = APIRouter()
    router.add_api_route("/health", _get_health, methods=["GET", "HEAD"])
    router.add_api_route("/ready", _get_ready, methods=["GET", "HEAD"])
    router.add_api_route("/metrics", _get_metrics)
    return router


def _build_api_router() -> APIRouter:
    router = APIRouter(dependencies=[Depends(check_api_key)])
    router.add_api_route("/v1/models", _list_models)
    router.add_api_route("/v1/models/{model:path}", _get_model)
    router.add_api_route("/server_info", _get_server_info)
    post: Any = {"methods": ["POST"], "response_model": None}
    router.add_api_route("/v1/chat/completions", create_chat_completion, **post)
    router.add_api_route("/v1/completions", create_completion, **post)
    router.add_api_route("/tokenize", _tokenize, **post)
    router.add_api_route("/detokenize", _detokenize, **post)
    router.add_api_route("/reset_prefix_cache", _reset_prefix_cache, **post)
    return router


async def _get_health(request: Request) -> dict[str, str]:
    death = get_context(request).engine.death
    if death is not None:
        raise RequestError(f"engine died: {death}", status=503, code="engine_died")
    return {"status": "ok"}


async def _get_ready(request: Request) -> dict[str, str]:
    if not get_context(request).engine.is_ready:
        raise RequestError("not serving: the engine is gone or shutting down.", status=503)
    return {"status": "ready"}


async def _get_metrics(request: Request) -> Response:
    body = get_context(request).metrics.render()
    return Response(body, media_type=CONTENT_TYPE_LATEST)


async def _list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_describe_model(get_context(request))]}


async def _get_model(request: Request, model: str) -> dict[str, Any]:
    context = get_context(request)
    check_model(context, model)
    return _describe_model(context)


def _describe_model(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created_s,
        "owned_by": "forerun",
        "max_model_len": context.engine.limits.max_model_len,
    }


async def _get_server_info(request: Request) -> dict[str, Any]:
    context = get_context(request)
    own = {"version": forerun.__version__, "model_name": context.model_name}
    info: dict[str, Any] = own | context.engine.info
    if "speculative" in info:
        info["speculative"] = info["speculative"] | context.metrics.budget.describe()
    return info


async def _tokenize(request: Request) -> dict[str, Any]:
    context = get_context(request)
    body = await parse_body(request, TokenizeBody)
    check_model(context, body.model)
    if body.messages is not None:
        token_ids = await encode_messages(
            context, body.messages, body.add_generation_prompt, body.chat_template_kwargs
        )
    else:
        special = body.add_special_tokens
        token_ids = await asyncio.to_thread(
            context.tokenizer.encode, body.prompt or "", add_special_tokens=special
        )
    answer = {"tokens": token_ids, "count": len(token_ids)}
    answer |= {"max_model_len": context.engine.limits.max_model_len}
    if body.return_token_strs:
        pieces = [context.tokenizer.token_bytes(token) for token in token_ids]
        answer["token_strs"] = [piece.decode("utf-8", errors="replace") for piece in pieces]
    return answer


async def _detokenize(request: Request) -> dict[str, str]:
    context = get_context(request)
    body = await parse_body(request, DetokenizeBody)
    check_model(context, body.model)
    vocab_size = context.engine.limits.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocab_size:
            message = f"tokens holds id {token}; ids are 0..{vocab_size - 1}."
            raise RequestError(message, param="tokens", code="token_id_out_of_range")
    decode = context.tokenizer.decode
    return {"prompt": await asyncio.to_thread(decode, body.tokens, skip_special_tokens=False)}


async def _reset_prefix_cache(request: Request) -> dict[str, str]:
    get_context(request).engine.reset_prefix_cache()
    return {"status": "ok"}
