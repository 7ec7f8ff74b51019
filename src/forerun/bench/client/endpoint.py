"""The server to measure: is it there, does it serve the model, how does it tell token counts.

Everything here happens before a run, through an ordinary HTTP client. `resolve_endpoint` sends one
request of one token, first with every field that makes a server tell tokens per event, then with
fewer, because strict servers refuse fields they do not know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from forerun.bench.client.stream import describe_refusal
from forerun.bench.options import BACKENDS, BenchConfig
from forerun.bench.workload import Row
from forerun.errors import ConfigError

_USAGE = {"include_usage": True}
_CONTINUOUS = {"include_usage": True, "continuous_usage_stats": True}
# From the most to the least a server may tell.
_REPORTING: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True, "stream_options": _CONTINUOUS},
    {"stream_options": _CONTINUOUS},
    {"stream_options": _USAGE},
    {},
)
_CONTROL_TIMEOUT_S = 60.0
_REFUSED = (400, 422)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where requests go and what each of them carries."""

    base_url: str
    backend: str
    model: str
    headers: dict[str, str]
    fields: dict[str, Any]
    send_seeds_from: int | None = None

    def build_request(self, row: Row, index: int) -> bytes:
        """Return the bytes of one request."""
        body = {"model": self.model, "stream": True, "max_tokens": row.max_tokens, **self.fields}
        body["messages" if row.is_chat else "prompt"] = row.prompt
        if self.send_seeds_from is not None:
            body["seed"] = self.send_seeds_from + index
        content = json.dumps(body).encode()
        url = urlsplit(self.base_url)
        head = {"Host": url.netloc, **self.headers, "Content-Length": str(len(content))}
        lines = [f"POST {url.path}{BACKENDS[self.backend]} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in head.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + content


def resolve_endpoint(config: BenchConfig, rows: list[Row]) -> Endpoint:
    """Return the endpoint for these rows once it has answered a request; raises ConfigError."""
    base_url = config.base_url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    if config.api_key is not None:
        headers["Authorization"] = f"Bearer {config.api_key}"
    backend = _resolve_backend(config, rows)
    with httpx.Client(base_url=base_url, headers=headers, timeout=_CONTROL_TIMEOUT_S) as http:
        model = _resolve_model(http, config)
        reporting = _probe_reporting(http, backend, model)
    return Endpoint(
        base_url=base_url,
        backend=backend,
        model=model,
        headers=headers,
        fields=reporting | _collect_sampling(config) | config.parse_extra_body(),
        send_seeds_from=config.seed if config.send_seeds else None,
    )


def reset_prefix_cache(endpoint: Endpoint) -> bool:
    """Ask the server to forget its prefix cache; return whether it did."""
    url = f"{endpoint.base_url}/reset_prefix_cache"
    try:
        reply = httpx.post(url, headers=endpoint.headers, timeout=_CONTROL_TIMEOUT_S)
    except httpx.HTTPError:
        return False
    return reply.is_success


def read_server_info(endpoint: Endpoint) -> dict[str, Any] | None:
    """Return what a Forerun server says of its configuration; None from any other server."""
    url = f"{endpoint.base_url}/server_info"
    try:
        reply = httpx.get(url, headers=endpoint.headers, timeout=_CONTROL_TIMEOUT_S)
        info = reply.json() if reply.is_success else None
    except (httpx.HTTPError, ValueError):
        return None
    return info if isinstance(info, dict) else None


def _resolve_backend(config: BenchConfig, rows: list[Row]) -> str:
    needed = "openai-chat" if rows[0].is_chat else "openai"
    if any(row.is_chat != rows[0].is_chat for row in rows):
        raise ConfigError("the data set mixes messages and prompts; measure them in two runs.")
    if config.backend not in (None, needed):
        raise ConfigError(
            f"--backend {config.backend} does not fit the data set {config.dataset_name}, whose "
            f"rows need {needed}; leave --backend out or choose other rows."
        )
    return needed


def _resolve_model(http: httpx.Client, config: BenchConfig) -> str:
    """Return the model to ask for, after checking that it is served where the server lists them."""
    reply = _send(http, "GET", "/v1/models")
    if not reply.is_success:
        if reply.status_code in (401, 403):
            raise ConfigError(f"{http.base_url} refuses the key; check --api-key.")
        if config.model is None:
            raise ConfigError(f"{http.base_url} does not list its models; give --model.")
        return config.model
    served = _read_model_names(reply)
    if config.model is None and served:
        return served[0]
    if config.model is None or config.model not in served:
        raise ConfigError(
            f"{http.base_url} does not serve the model {config.model!r}; it serves "
            f"{', '.join(served) or 'nothing'}."
        )
    return config.model


def _read_model_names(reply: httpx.Response) -> list[str]:
    try:
        return [str(item["id"]) for item in reply.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{reply.url} is no OpenAI-compatible server: its list of models is not as expected."
        ) from error


def _probe_reporting(http: httpx.Client, backend: str, model: str) -> dict[str, Any]:
    """Return the fullest reporting fields the server takes."""
    prompt: dict[str, Any] = {"prompt": "Hello"}
    if backend == "openai-chat":
        prompt = {"messages": [{"role": "user", "content": "Hello"}]}
    body = prompt | {"model": model, "max_tokens": 1, "stream": True}
    refusal = ""
    for reporting in _REPORTING:
        reply = _send(http, "POST", BACKENDS[backend], json=body | reporting)
        if reply.is_success:
            return reporting
        refusal = describe_refusal(reply.status_code, reply.content)
        if reply.status_code not in _REFUSED:
            break
    raise ConfigError(f"{http.base_url} refuses a request of one token ({refusal}).")


def _send(http: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
    try:
        return http.request(method, path, **options)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"cannot reach {http.base_url} ({error}); start the server or check --base-url."
        ) from error


def _collect_sampling(config: BenchConfig) -> dict[str, Any]:
    given = {"temperature": config.temperature, "top_p": config.top_p, "top_k": config.top_k}
    given = {name: value for name, value in given.items() if value is not None}
    # Random prompts have no natural end; vLLM's client forces the length as well.
    is_forced = config.ignore_eos or config.dataset_name == "random"
    return given | ({"ignore_eos": True} if is_forced else {})
