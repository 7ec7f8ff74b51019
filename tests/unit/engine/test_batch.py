"""Flat rows of a step: the native layout equals the one in numpy, and a lost row is noticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import kernels
from forerun.attention.layout import lay_out, lay_out_single_rows, pad_tables
from forerun.core import SamplingParams
from forerun.engine.batch import StepBatch, build_batch, select_logits_rows
from forerun.plan import ScheduledRequest, StepPlan

BLOCK_SIZE = 4


def make_request(index: int, computed: int, new: int, drafts: int, spare: int) -> ScheduledRequest:
    num_blocks = -(-(computed + new + drafts) // BLOCK_SIZE) + spare
    return ScheduledRequest(
        request_id=str(index),
        generation=0,
        token_ids=list(range(100 * index, 100 * index + computed + new)),
        num_prompt_tokens=1,
        num_computed_tokens=computed,
        num_new_tokens=new,
        draft_token_ids=[7, 8, 9, 10][:drafts],
        block_table=[1 + 50 * index + i for i in range(num_blocks)],
        params=SamplingParams(),
        seed=0,
        choice_index=0,
        num_draws=0,
    )


def build(requests: list[ScheduledRequest]) -> StepBatch:
    return build_batch(StepPlan(step=1, requests=requests), kv_block_size=BLOCK_SIZE)


@given(computed=st.lists(st.integers(0, 21), min_size=1, max_size=6))
def test_one_row_each_is_laid_out_from_padded_tables(computed: list[int]) -> None:
    requests = [make_request(index, at, 1, 0, index % 3) for index, at in enumerate(computed)]
    tables = pad_tables([request.block_table for request in requests])
    single = lay_out_single_rows(tables, np.array(computed), BLOCK_SIZE)
    general = lay_out(requests, BLOCK_SIZE)
    assert np.array_equal(single.positions, general.positions)
    for name in ("query_start_loc", "context_lens", "block_tables", "slot_mapping"):
        left, right = getattr(single.attention, name), getattr(general.attention, name)
        assert np.array_equal(left, right), name
        assert left.dtype == right.dtype == np.int64, name


def test_a_single_row_without_a_slot_is_noticed() -> None:
    tables = pad_tables([[5], [6, 7]])
    with pytest.raises(AssertionError, match="no reserved slot"):
        lay_out_single_rows(tables, np.array([BLOCK_SIZE, 0]), BLOCK_SIZE)


requests_of = st.lists(
    st.tuples(st.integers(0, 21), st.integers(1, 9), st.integers(0, 4), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(sizes=requests_of)
def test_both_layouts_are_the_same(sizes: list[tuple[int, int, int, int]]) -> None:
    requests = [make_request(index, *size) for index, size in enumerate(sizes)]
    native = build(requests)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_probe", lambda: (None, "switched off"))
        plain = build(requests)
    assert np.array_equal(native.token_ids, plain.token_ids)
    assert np.array_equal(native.positions, plain.positions)
    for name in ("query_start_loc", "context_lens", "block_tables", "slot_mapping"):
        left, right = getattr(native.attention, name), getattr(plain.attention, name)
        assert np.array_equal(left, right), name
        assert left.dtype == right.dtype == np.int64, name


@pytest.mark.parametrize("switched_off", [False, True])
def test_a_row_without_a_block_is_an_error(
    switched_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if switched_off:
        monkeypatch.setattr(kernels, "_probe", lambda: (None, "switched off"))
    request = make_request(0, computed=4, new=1, drafts=0, spare=0)
    request.block_table = [3, 0]
    with pytest.raises(AssertionError, match="no reserved slot"):
        build([request])


def test_rows_that_need_logits() -> None:
    decoding = make_request(0, computed=5, new=1, drafts=2, spare=0)
    chunk = make_request(1, computed=0, new=4, drafts=0, spare=0)
    chunk.token_ids = list(range(9))
    assert select_logits_rows([decoding, chunk]) == [range(3), range(7, 7)]
