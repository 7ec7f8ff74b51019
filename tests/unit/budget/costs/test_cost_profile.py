"""Look-ups in a cost profile, and what is refused as one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cost_profiles import make_profile
from forerun.budget.costs.profile import CostProfile

TERMS = ("request_ms", "kv_token_ms", "row_token_ms", "sampled_row_ms", "filtered_row_ms")


def test_verification_is_linear_between_sizes_and_goes_on_with_the_last_slope() -> None:
    profile = make_profile()
    rows = np.array([1, 2, 3, 4, 6, 8, 10, 108])
    assert profile.verify(rows).tolist() == [3.0, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 56.0]


def test_a_step_costs_at_least_as_much_as_one_row() -> None:
    assert make_profile().verify(0) == 3.0


def test_a_scalar_look_up_is_that_of_an_array() -> None:
    profile = make_profile(graph_rows=4)
    rows = np.arange(1, 20)
    assert [float(profile.verify(size)) for size in rows.tolist()] == profile.verify(rows).tolist()
    drafts = profile.draft(rows, 3)
    assert [float(profile.draft(size, 3)) for size in rows.tolist()] == drafts.tolist()


def test_graphed_sizes_cost_what_the_next_measured_size_does() -> None:
    profile = make_profile(graph_rows=8, verify_ms=np.array([3.0, 3.5, 4.0, 6.0]))
    rows = np.arange(1, 9)
    assert profile.verify(rows).tolist() == [3.0, 3.5, 4.0, 4.0, 6.0, 6.0, 6.0, 6.0]
    assert profile.verify(2.5) == 4.0


def test_nothing_is_blended_across_the_limit_of_graphs() -> None:
    """From the limit on, a step costs what the first measured size without a graph does."""
    profile = make_profile(
        verify_rows=np.array([1, 4, 8, 16]),
        verify_ms=np.array([2.0, 4.0, 40.0, 48.0]),
        graph_rows=4,
    )
    assert profile.verify(np.array([4, 5, 8, 12, 16, 24])).tolist() == [4, 40, 40, 44, 48, 56]


def test_drafting_costs_the_first_token_and_each_further_one() -> None:
    profile = make_profile()
    assert profile.draft(np.array([0, 1, 2, 4, 8]), 3) == pytest.approx([0, 0.7, 1.4, 2.8, 5.6])
    assert profile.draft(2, np.arange(4)) == pytest.approx([0.0, 1.0, 1.2, 1.4])
    assert profile.draft(0, 7) == 0.0


def test_without_a_drafter_drafting_costs_nothing() -> None:
    none = np.zeros(0)
    profile = make_profile(draft_requests=none, draft_first_ms=none, draft_next_ms=none)
    assert profile.draft(np.array([0, 1, 9]), 4).tolist() == [0.0, 0.0, 0.0]


def test_one_measured_size_holds_for_all() -> None:
    profile = make_profile(verify_rows=np.array([1]), verify_ms=np.array([3.0]))
    assert profile.verify(np.array([1, 50])).tolist() == [3.0, 3.0]


def test_noise_does_not_make_more_rows_cheaper() -> None:
    profile = make_profile(verify_ms=np.array([3.0, 5.0, 4.0, 4.5]))
    assert profile.verify_ms.tolist() == [3.0, 5.0, 5.0, 5.0]
    assert (np.diff(profile.verify(np.arange(1, 40))) >= 0).all()


def test_json_gives_back_the_same_profile() -> None:
    profile = make_profile(graph_rows=4)
    value = json.loads(json.dumps(profile.to_dict()))
    assert value["verify"][2] == {"rows": 4, "ms": 4.0}
    again = CostProfile.from_dict(value, source="file")
    assert again.to_dict() == profile.to_dict()
    assert again.source == "file"
    assert again.verify(np.arange(20)).tolist() == profile.verify(np.arange(20)).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"verify_rows": np.zeros(0), "verify_ms": np.zeros(0)}, "verify_rows is empty"),
        ({"verify_rows": np.array([2, 3, 4, 8])}, "verify_rows must rise strictly from 1"),
        ({"verify_rows": np.array([1, 4, 4, 8])}, "verify_rows must rise strictly from 1"),
        ({"verify_rows": np.array([1, 2.5, 4, 8])}, "verify_rows must be whole numbers"),
        ({"verify_ms": np.array([3.0, 3.0])}, "verify_ms must have 4 entries"),
        ({"verify_ms": np.array([3.0, np.nan, 4.0, 6.0])}, "verify_ms must be finite"),
        ({"verify_ms": np.array([-3.0, 3.0, 4.0, 6.0])}, "verify_ms must be finite and not neg"),
        ({"draft_first_ms": np.array([1.0])}, "draft_first_ms must have 2 entries"),
        ({"graph_rows": 3}, "graph_rows is 3"),
        ({"context_tokens": -1}, "context_tokens must be at least 0"),
        *[({name: float("inf")}, f"{name} must be finite") for name in TERMS],
    ],
)
def test_what_cannot_be_a_cost_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_profile(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format is 'other' version 1"),
        ({"version": 2}, "version 2, this reads"),
        ({"verify": None}, "wrong type"),
        ({"key": []}, "wrong type"),
        ({"verify": [{"rows": 1}]}, "'ms' is missing"),
    ],
)
def test_a_damaged_dict_is_refused(changes: dict[str, Any], message: str) -> None:
    value = {**make_profile().to_dict(), **changes}
    with pytest.raises(ValueError, match=message):
        CostProfile.from_dict(value, source="file")


def test_a_dict_without_a_term_is_refused() -> None:
    value = make_profile().to_dict()
    del value["kv_token_ms"]
    with pytest.raises(ValueError, match="'kv_token_ms' is missing"):
        CostProfile.from_dict(value, source="file")
