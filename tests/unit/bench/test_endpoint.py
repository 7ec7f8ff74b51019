"""Before a run: is the server there, does it serve the model, how does it count."""

from __future__ import annotations

import json
import socket

import pytest

from forerun.bench.client.endpoint import reset_prefix_cache, resolve_endpoint
from forerun.bench.options import BenchConfig
from forerun.bench.workload import Row, parse_rows
from forerun.errors import ConfigError
from unit.bench.scripted_server import make_rows
from unit.bench.stub_server import StubServer

CHAT = parse_rows('{"messages": [{"role": "user", "content": "Hi"}]}', "x")


def find_closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def split_request(request: bytes) -> tuple[str, dict]:
    head, _, body = request.partition(b"\r\n\r\n")
    return head.decode(), json.loads(body)


def test_a_server_that_takes_everything_is_asked_for_everything() -> None:
    with StubServer() as server:
        endpoint = resolve_endpoint(BenchConfig(base_url=server.base_url + "/v1/"), make_rows(1))
    assert endpoint.model == "m"
    assert endpoint.fields == {
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        (
            ("return_token_ids",),
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
        (
            ("return_token_ids", "continuous_usage_stats"),
            {"stream_options": {"include_usage": True}},
        ),
        (("return_token_ids", "stream_options"), {}),
    ],
)
def test_a_strict_server_is_asked_for_less(refused: tuple[str, ...], kept: dict) -> None:
    with StubServer(refused_fields=refused) as server:
        endpoint = resolve_endpoint(BenchConfig(base_url=server.base_url), make_rows(1))
    assert endpoint.fields == kept


def test_a_server_that_refuses_the_plainest_request_is_quoted() -> None:
    with StubServer(refused_fields=("max_tokens",)) as server:
        config = BenchConfig(base_url=server.base_url)
        with pytest.raises(ConfigError, match="request of one token .*unknown max_tokens"):
            resolve_endpoint(config, make_rows(1))


def test_a_request_carries_row_model_and_options() -> None:
    config = {"temperature": 0.5, "top_k": 3, "extra_body": '{"min_p": 0.1}', "ignore_eos": True}
    with StubServer() as server:
        given = BenchConfig(
            base_url=server.base_url, api_key="k", seed=7, send_seeds=True, **config
        )
        endpoint = resolve_endpoint(given, make_rows(3))
    head, body = split_request(endpoint.build_request(make_rows(3)[2], 2))
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer k" in head
    assert server.headers[0]["Authorization"] == "Bearer k"
    expected = {"prompt": "prompt 2", "max_tokens": 8, "model": "m", "stream": True, "seed": 9}
    expected |= {"temperature": 0.5, "top_k": 3, "min_p": 0.1, "ignore_eos": True}
    assert body.items() >= expected.items()


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    with StubServer(refused_fields=("return_token_ids", "stream_options")) as server:
        endpoint = resolve_endpoint(BenchConfig(base_url=server.base_url), CHAT)
    head, body = split_request(endpoint.build_request(CHAT[0], 0))
    assert head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert body.keys() == {"model", "stream", "max_tokens", "messages"}


def test_an_unreachable_server_is_one_sentence() -> None:
    config = BenchConfig(base_url=f"http://127.0.0.1:{find_closed_port()}")
    with pytest.raises(ConfigError, match=r"cannot reach http://127.* check --base-url"):
        resolve_endpoint(config, make_rows(1))


def test_a_wrong_model_is_answered_with_the_served_ones() -> None:
    with StubServer(models=["a", "b"]) as server:
        config = BenchConfig(base_url=server.base_url, model="c")
        with pytest.raises(ConfigError, match="does not serve the model 'c'; it serves a, b"):
            resolve_endpoint(config, make_rows(1))


def test_a_server_without_a_list_needs_a_model_name() -> None:
    with StubServer(models_status=404) as server:
        with pytest.raises(ConfigError, match="give --model"):
            resolve_endpoint(BenchConfig(base_url=server.base_url), make_rows(1))
        config = BenchConfig(base_url=server.base_url, model="x")
        assert resolve_endpoint(config, make_rows(1)).model == "x"


def test_a_wrong_key_is_named() -> None:
    with StubServer(models_status=401) as server, pytest.raises(ConfigError, match="--api-key"):
        resolve_endpoint(BenchConfig(base_url=server.base_url), make_rows(1))


def test_rows_and_backend_must_fit() -> None:
    mixed: list[Row] = [*CHAT, *make_rows(1)]
    with pytest.raises(ConfigError, match="mixes messages and prompts"):
        resolve_endpoint(BenchConfig(), mixed)
    with pytest.raises(ConfigError, match="does not fit the data set"):
        resolve_endpoint(BenchConfig(backend="openai-chat"), make_rows(1))


@pytest.mark.parametrize("can_reset", [True, False])
def test_the_prefix_cache_is_reset_where_that_is_possible(can_reset: bool) -> None:
    with StubServer(can_reset=can_reset) as server:
        endpoint = resolve_endpoint(BenchConfig(base_url=server.base_url), make_rows(1))
        assert reset_prefix_cache(endpoint) is can_reset
