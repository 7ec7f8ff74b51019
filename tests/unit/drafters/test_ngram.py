"""Prompt lookup against a brute-force search, and that its index never rescans."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from forerun.core import SamplingParams
from forerun.drafters.ngram import MAX_MATCH, NgramDrafter, NgramIndex
from forerun.plan import DraftRequest

MIN_N, MAX_N = 2, 4


def ask(token_ids: list[int], depth: int, request_id: str = "r") -> DraftRequest:
    return DraftRequest(
        request_id=request_id,
        generation=0,
        token_ids=token_ids,
        depth=depth,
        block_table=[],
        params=SamplingParams(),
        seed=0,
        choice_index=0,
        num_draws=0,
    )


def make_drafter() -> NgramDrafter:
    return NgramDrafter(max_speculative_tokens=8, min_n=MIN_N, max_n=MAX_N)


def search(tokens: list[int], depth: int) -> list[int]:
    """Longest suffix first, latest earlier occurrence first, looping copies: by scanning."""
    for n in range(min(MAX_N, len(tokens)), MIN_N - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                period = len(tokens) - end
                return [tokens[end + offset % period] for offset in range(depth)]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 60))
def test_incremental_index_equals_a_full_search(tokens: list[int], depth: int, first: int) -> None:
    drafter = make_drafter()
    for end in range(min(first, len(tokens)), len(tokens) + 1):
        prefix = tokens[:end]
        proposal = drafter.propose([ask(prefix, depth)])
        assert proposal.draft_token_ids == [search(prefix, depth)]


def test_longest_match_wins_over_a_more_recent_short_one() -> None:
    tokens = [1, 2, 3, 4, 50, 9, 3, 4, 60, 1, 2, 3, 4]
    assert make_drafter().propose([ask(tokens, 1)]).draft_token_ids == [[50]]


def test_most_recent_of_equal_matches_wins() -> None:
    tokens = [3, 4, 50, 3, 4, 60, 3, 4]
    assert make_drafter().propose([ask(tokens, 1)]).draft_token_ids == [[60]]


def test_a_short_loop_is_continued_to_full_depth() -> None:
    assert make_drafter().propose([ask([7, 8, 7, 8], 5)]).draft_token_ids == [[7, 8, 7, 8, 7]]


def test_each_committed_token_is_indexed_once() -> None:
    """The index reads only new tokens: a list that forbids other reads proves it."""

    class Guarded(list):
        allowed_from = 0

        def __getitem__(self, key):
            start = key.start if isinstance(key, slice) else key
            assert start < 0 or start >= self.allowed_from, f"rescanned from {start}"
            return super().__getitem__(key)

    tokens = Guarded(range(100))
    index = NgramIndex(MIN_N, MAX_N)
    index.extend(tokens)
    tokens.append(100)
    tokens.allowed_from = 100 - MAX_N
    index.extend(tokens)
    assert index.find(tokens) is None
    assert index.num_indexed == 101


def test_requests_do_not_share_an_index_and_release_forgets() -> None:
    drafter = make_drafter()
    drafter.propose([ask([1, 2, 9, 1, 2], 1, "a")])
    assert drafter.propose([ask([1, 2], 1, "b")]).draft_token_ids == [[]]
    drafter.release(["a", "never seen"])
    assert drafter.propose([ask([5], 1, "a")]).draft_token_ids == [[]]


def count_brute_force(tokens: list[int]) -> int:
    """The longest earlier occurrence of a suffix within the index's reach, counted on backwards."""
    for n in range(min(MAX_N, len(tokens)), MIN_N - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                length = n
                while (
                    length < min(MAX_MATCH, end)
                    and tokens[end - length - 1] == (tokens[-length - 1])
                ):
                    length += 1
                return length
    return 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_evidence_is_the_logarithm_of_the_growing_match(tokens: list[int], depth: int) -> None:
    proposal = make_drafter().propose([ask(tokens, depth)])
    length = count_brute_force(tokens)
    expected = [math.log2(length + place) for place in range(depth)] if length else []
    assert proposal.evidence == [expected]


def test_matches_are_counted_up_to_a_limit() -> None:
    tokens = list(range(100)) + list(range(60))
    assert make_drafter().propose([ask(tokens, 1)]).evidence == [[math.log2(MAX_MATCH)]]


def test_evidence_is_a_function_of_the_prefix() -> None:
    """What follows the match decides the drafts, not how sure of them the drafter is."""
    first = make_drafter().propose([ask([1, 2, 3, 4, 1, 2], 2)])
    other = make_drafter().propose([ask([1, 2, 8, 9, 1, 2], 2)])
    assert first.draft_token_ids != other.draft_token_ids
    assert first.evidence == other.evidence
