"""HTTP framing: any cut of the bytes into reads gives the same content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.bench.client.connection import ChunkedBody, SizedBody


def feed(body: ChunkedBody | SizedBody, data: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return b"".join(body.feed(data[a:b]) for a, b in zip(edges, edges[1:], strict=False))


@given(
    st.lists(st.binary(min_size=1, max_size=40), max_size=6),
    st.sampled_from([b"", b";name=value"]),
    st.lists(st.integers(0, 10_000), max_size=12),
)
def test_chunks_are_joined_however_they_arrive(
    contents: list[bytes], extension: bytes, cuts: list[int]
) -> None:
    chunks = [b"%x%b\r\n%b\r\n" % (len(text), extension, text) for text in contents]
    body = ChunkedBody()
    data = b"".join(chunks) + b"0\r\nTrailer: x\r\n\r\n"
    assert feed(body, data[:-1], cuts) == b"".join(contents)
    assert not body.is_done
    body.feed(data[-1:])
    assert body.is_done


def test_a_read_that_is_one_chunk_leaves_nothing_behind() -> None:
    body = ChunkedBody()
    assert [body.feed(b"3\r\nabc\r\n"), body.feed(b"2\r\nde\r\n0")] == [b"abc", b"de"]
    assert body.feed(b"\r\n\r\n") == b""
    assert body.is_done


def test_content_is_handed_on_before_its_chunk_is_whole() -> None:
    body = ChunkedBody()
    assert body.feed(b"a\r\n01234") == b"01234"
    assert body.feed(b"56789\r\n") == b"56789"


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ChunkedBody().feed(b"zz\r\n")


@given(st.binary(max_size=50), st.lists(st.integers(0, 10_000), max_size=5))
def test_a_sized_body_ends_after_its_size(content: bytes, cuts: list[int]) -> None:
    body = SizedBody(len(content))
    assert feed(body, content, cuts) == content
    assert body.is_done


def test_a_body_without_a_size_ends_with_the_connection() -> None:
    body = SizedBody(None)
    assert body.feed(b"abc") == b"abc"
    assert not body.is_done
    assert body.ends_by_closing
