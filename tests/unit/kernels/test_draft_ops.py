"""Blocks drafted natively and in PyTorch, against a float64 walk along the tokens they drafted.

Where the two best logits are closer than MARGIN, rounding may decide, and what follows with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from forerun.kernels import Kernels, packed, row_calls
from forerun.kernels.draft_ops import (
    ConfidenceParams,
    SequentialHead,
    draft_block,
    draft_block_reference,
)

MARGIN = 1e-4
VOCAB = 700
HIDDEN = 24

relaxed = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
shapes = {
    "num_rows": st.integers(1, 30),
    "num_positions": st.integers(1, 8),
    "draft_vocab": st.sampled_from([1, 2, 15, 16, 17, 33, 64, 100, 511, 700]),
    "rank": st.sampled_from([2, 4, 6, 16, 64, 70]),
    "seed": st.integers(0, 999),
}
types = st.sampled_from([torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def use(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (packed, row_calls):
        monkeypatch.setattr(module, "find_kernels", lambda: kernels)


@dataclass
class Case:
    base: Tensor
    anchors: Tensor
    head: SequentialHead
    confidence: ConfidenceParams | None

    def draft(self) -> tuple[Tensor, Tensor | None]:
        assert self.head.packed is not None
        return draft_block(self.base, self.anchors, self.head, self.confidence)

    def select(self, rows: slice) -> Case:
        """Return some of the requests."""
        given = self.confidence
        confidence = given and ConfidenceParams(given.hidden[rows], given.weight, given.bias)
        return Case(self.base[rows], self.anchors[rows], self.head, confidence)


def make_case(
    num_rows: int = 3,
    num_positions: int = 4,
    draft_vocab: int = 100,
    rank: int = 16,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    reads_embedding: bool = True,
) -> Case:
    """Return random requests; every third row has masked logits."""
    torch.manual_seed(seed)
    base = torch.randn(num_rows, num_positions, draft_vocab) * 2
    base[::3].masked_fill_(torch.rand_like(base[::3]) < 0.3, -torch.inf)
    base[..., draft_vocab // 2] = 0.0
    w1, w2 = torch.randn(VOCAB, rank).to(dtype), torch.randn(draft_vocab, rank).to(dtype)
    d2t = torch.randperm(VOCAB)[:draft_vocab]
    weight = torch.randn(HIDDEN + rank * reads_embedding) * 0.3
    hidden = torch.randn(num_rows, num_positions, HIDDEN).to(dtype)
    head = SequentialHead.build(w1, w2, d2t if seed % 2 else None)
    anchors = torch.randint(0, VOCAB, (num_rows,))
    return Case(base, anchors, head, ConfidenceParams(hidden, weight, -0.4))


def check(case: Case, token_ids: Tensor, rates: Tensor | None) -> None:
    """Follow the tokens drafted: each is the best there, and so are its chances."""
    head, given = case.head, case.confidence
    assert head.markov_w1 is not None
    assert head.markov_w2 is not None
    ids = torch.arange(case.base.shape[2]) if head.d2t is None else head.d2t
    previous = torch.cat((case.anchors[:, None], token_ids[:, :-1]), dim=1)
    embedding = head.markov_w1[previous].double()
    logits = case.base.double() + embedding @ head.markov_w2.double().T
    chosen = (token_ids[..., None] == ids).to(torch.int8)
    assert torch.equal(chosen.sum(-1), torch.ones_like(token_ids)), "a token that is no draft"
    best = logits.max(dim=-1).values
    assert torch.all(best - logits.gather(2, chosen.argmax(-1, keepdim=True))[..., 0] < MARGIN)
    if given is None or rates is None:
        assert given is rates
        return
    inputs = torch.cat((given.hidden.double(), embedding), -1)[..., : len(given.weight)]
    expected = torch.sigmoid(inputs @ given.weight.double() + given.bias)
    assert torch.allclose(rates.double(), expected, rtol=0, atol=1e-5)


@relaxed
@given(**shapes, dtype=types, reads_embedding=st.booleans(), num_threads=st.integers(1, 3))
def test_drafts_the_best_token_after_the_one_before(
    dtype: torch.dtype, reads_embedding: bool, num_threads: int, threads: None, **shape: int
) -> None:
    torch.set_num_threads(num_threads)
    case = make_case(**shape, dtype=dtype, reads_embedding=reads_embedding)
    check(case, *case.draft())
    check(case, *draft_block_reference(case.base, case.anchors, case.head, case.confidence))


@relaxed
@given(**shapes, dtype=types, num_threads=st.integers(1, 3))
def test_the_first_of_equals_wins(
    dtype: torch.dtype, num_threads: int, threads: None, **shape: int
) -> None:
    """Small whole numbers have no rounding and many ties."""
    torch.set_num_threads(num_threads)
    case = make_case(**shape, dtype=dtype)
    table = case.head.markov_w1
    assert table is not None
    tables = [(torch.rand(n, shape["rank"]) < 0.1).to(dtype) for n in (VOCAB, case.base.shape[2])]
    case.head = SequentialHead.build(*tables, case.head.d2t)
    case.base = case.base.round().clamp(-1, 1)
    case.base[0] = -torch.inf
    token_ids, _ = case.draft()
    previous = case.anchors
    for position in range(shape["num_positions"]):
        logits = case.base[:, position] + tables[0][previous].float() @ tables[1].float().T
        best = torch.from_numpy(logits.numpy().argmax(axis=-1))  # the first
        previous = case.head.find_target_ids(best)
        assert torch.equal(token_ids[:, position], previous)


def test_a_request_gets_the_same_bits_in_any_company(threads: None) -> None:
    case = make_case(29, 5, 611, 64)
    token_ids, rates = case.draft()
    assert rates is not None
    for count, rows in ((1, slice(0, 1)), (2, slice(3, 20)), (3, slice(28, 29))):
        torch.set_num_threads(count)
        some_ids, some_rates = case.select(rows).draft()
        assert some_rates is not None
        assert torch.equal(token_ids[rows], some_ids)
        assert torch.equal(rates[rows], some_rates)


def test_short_blocks_are_read_where_they_lie() -> None:
    case = make_case(4, 6, 100)
    case.confidence = None
    long_ids, rates = case.draft()
    case.base = case.base[:, :2]
    short_ids, _ = case.draft()
    assert rates is None
    assert torch.equal(short_ids, long_ids[:, :2])


@pytest.mark.parametrize("anchor", [-1, VOCAB])
def test_an_anchor_beyond_the_vocabulary_is_refused(anchor: int) -> None:
    case = make_case()
    case.anchors[1] = anchor
    with pytest.raises(IndexError, match=rf"0 \.\. {VOCAB - 1}"):
        case.draft()


def test_a_draft_vocabulary_of_another_target_is_refused() -> None:
    tables = torch.zeros(10, 4), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"0 \.\. 9"):
        SequentialHead.build(*tables, torch.tensor([1, 10, 2]))


@pytest.mark.parametrize("rank", [3, 16])
def test_without_kernels_or_with_an_odd_rank_pytorch_drafts(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank == 16:
        monkeypatch.setattr(packed, "find_kernels", lambda: None)
    case = make_case(rank=rank)
    assert case.head.packed is None
    check(case, *draft_block(case.base, case.anchors, case.head, case.confidence))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_without_markov_tables_positions_are_independent(
    has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(row_calls, "find_kernels", lambda: None)
    case = make_case(reads_embedding=False)
    given = case.confidence
    assert given is not None
    head = SequentialHead.build(d2t=torch.randperm(VOCAB)[:100])
    token_ids, rates = draft_block(case.base, case.anchors, head, given)
    assert rates is not None
    assert torch.equal(token_ids, head.find_target_ids(case.base.argmax(dim=-1)))
    expected = torch.sigmoid(given.hidden.double() @ given.weight.double() + given.bias)
    assert torch.allclose(rates.double(), expected, rtol=0, atol=1e-5)
