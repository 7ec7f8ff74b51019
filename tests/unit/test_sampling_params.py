"""SamplingParams refuses what it cannot mean, naming the field, whatever type it was given."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.core import SamplingParams
from forerun.errors import RequestError

INTEGER_FIELDS = ("n", "top_k", "max_tokens", "min_tokens", "seed", "logprobs", "prompt_logprobs")
NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@pytest.mark.parametrize("name", [*INTEGER_FIELDS, *NUMBER_FIELDS])
def test_an_integer_too_large_for_a_float_is_out_of_range(name: str) -> None:
    """A 400-digit max_tokens raised OverflowError in the range check and answered 500."""
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: 10**400})
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("name", INTEGER_FIELDS)
@pytest.mark.parametrize("value", [2.5, "3", True])
def test_integer_fields_take_integers_only(name: str, value: Any) -> None:
    """max_tokens = 2.5 was taken, and no count of tokens ever equals it: it ran for ever."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", NUMBER_FIELDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", True])
def test_number_fields_take_finite_numbers_only(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_one_stop_string_is_not_one_per_character() -> None:
    """stop="END" stopped at the first E, N or D."""
    given: Any = "END"
    assert SamplingParams(stop=given).stop == ("END",)
    assert SamplingParams(stop=("E", "N")).stop == ("E", "N")
