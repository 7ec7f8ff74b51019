"""The fused loss against the formulas written out, with autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.training.objective.loss import (
    LossWeights,
    RowLabels,
    RowLosses,
    Rows,
    Teacher,
    compute_confidence_loss,
    compute_distillation_loss,
    compute_position_weights,
)

NUM_ROWS, HIDDEN, RANK, VOCAB, DRAFT_VOCAB = 11, 6, 3, 40, 17
MIXED = LossWeights(hard=0.3, soft=0.7, l1=0.9, confidence=1.0)
ONLY = {
    "hard": LossWeights(hard=1.0, soft=0.0, l1=0.0, confidence=0.0),
    "soft": LossWeights(hard=0.0, soft=1.0, l1=0.0, confidence=0.0),
    "l1": LossWeights(hard=0.0, soft=0.0, l1=1.0, confidence=0.0),
    "mixed": MIXED,
}


class Case:
    """Random rows against a target whose vocabulary is larger than the draft's."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        self.hidden = draw(NUM_ROWS, HIDDEN).requires_grad_()
        self.markov = draw(NUM_ROWS, RANK).requires_grad_()
        self.markov_weight = draw(DRAFT_VOCAB, RANK).requires_grad_()
        full_head, target_hidden = draw(VOCAB, HIDDEN), draw(NUM_ROWS, HIDDEN)
        self.full_probs = (target_hidden @ full_head.T).softmax(-1)
        normaliser = (target_hidden @ full_head.T).logsumexp(-1)
        self.teacher = Teacher(full_head[:DRAFT_VOCAB], target_hidden, normaliser)
        draft_ids = torch.randint(0, DRAFT_VOCAB, (NUM_ROWS,), generator=generator)
        draft_ids[2] = -1
        weights = torch.rand(NUM_ROWS, generator=generator, dtype=torch.float64).to(dtype)
        weights[5] = 0
        self.labels = RowLabels(draft_ids, weights)

    def inputs(self) -> list[Tensor]:
        return [self.hidden, self.markov, self.markov_weight]

    def fused(self, terms: LossWeights, max_bytes: int = 1 << 20) -> tuple[Tensor, RowLosses]:
        return compute_distillation_loss(
            Rows(self.hidden, self.markov, self.markov_weight),
            self.teacher,
            self.labels,
            terms=terms,
            totals=self.labels.compute_totals(),
            max_bytes=max_bytes,
        )

    def plain(self, terms: LossWeights) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.hidden @ self.teacher.head.T + self.markov @ self.markov_weight.T
        q, log_q = logits.softmax(-1), logits.log_softmax(-1)
        p = self.full_probs[:, :DRAFT_VOCAB]
        weights, inside = self.labels.weights, self.labels.draft_ids >= 0
        rows = {
            "hard": F.nll_loss(log_q, self.labels.draft_ids, reduction="none", ignore_index=-1),
            "soft": -(p / p.sum(-1, keepdim=True) * log_q).sum(-1),
            "l1": (q - p).abs().sum(-1) + self.full_probs[:, DRAFT_VOCAB:].sum(-1),
        }
        hard = (rows["hard"] * weights)[inside].sum() / weights[inside].sum()
        soft, l1 = ((rows[name] * weights).sum() / weights.sum() for name in ("soft", "l1"))
        return terms.hard * hard + terms.soft * soft + terms.l1 * l1, rows


@pytest.mark.parametrize("terms", ONLY.values(), ids=ONLY)
def test_loss_and_gradients_are_those_of_the_formulas(terms: LossWeights) -> None:
    case = Case()
    loss, losses = case.fused(terms)
    expected, rows = case.plain(terms)
    torch.testing.assert_close(loss, expected)
    for name, values in rows.items():
        torch.testing.assert_close(getattr(losses, name), values.detach())
    # Times 3: what comes from behind the loss must scale the gradients.
    gradients = torch.autograd.grad(3 * loss, case.inputs())
    expected_gradients = torch.autograd.grad(3 * expected, case.inputs(), allow_unused=False)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, wanted)


def test_gradients_agree_with_finite_differences() -> None:
    case = Case()
    assert torch.autograd.gradcheck(lambda *_: case.fused(MIXED)[0], case.inputs())


def test_acceptance_is_the_overlap_over_the_whole_vocabulary() -> None:
    case = Case()
    _, losses = case.fused(MIXED)
    logits = case.hidden @ case.teacher.head.T + case.markov @ case.markov_weight.T
    q = F.pad(logits.softmax(-1), (0, VOCAB - DRAFT_VOCAB))
    overlap = torch.minimum(q, case.full_probs).sum(-1)
    torch.testing.assert_close(losses.acceptance, overlap.detach())


@pytest.mark.parametrize("rows_per_chunk", [1, 4, NUM_ROWS])
def test_chunks_change_nothing(rows_per_chunk: int) -> None:
    case = Case()
    loss, losses = case.fused(MIXED, max_bytes=rows_per_chunk * DRAFT_VOCAB * 4)
    whole, whole_losses = case.fused(MIXED)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(losses.l1, whole_losses.l1)
    pairs = zip(
        torch.autograd.grad(loss, case.inputs()),
        torch.autograd.grad(whole, case.inputs()),
        strict=True,
    )
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


def test_without_a_markov_head_only_the_hidden_state_has_a_gradient() -> None:
    case = Case()
    loss, _ = compute_distillation_loss(
        Rows(case.hidden, None, None),
        case.teacher,
        case.labels,
        terms=MIXED,
        totals=case.labels.compute_totals(),
        max_bytes=1 << 20,
    )
    case.markov = torch.zeros_like(case.markov)
    expected, _ = case.plain(MIXED)
    torch.testing.assert_close(loss, expected)
    (got,) = torch.autograd.grad(loss, [case.hidden])
    (wanted,) = torch.autograd.grad(expected, [case.hidden])
    torch.testing.assert_close(got, wanted)


def test_totals_of_all_processes_make_parts_add_up_to_the_whole() -> None:
    case = Case()
    whole, _ = case.fused(MIXED)
    totals = case.labels.compute_totals()
    parts = []
    for part in (slice(0, 4), slice(4, None)):
        teacher = Teacher(
            case.teacher.head, case.teacher.hidden[part], case.teacher.log_normaliser[part]
        )
        labels = RowLabels(case.labels.draft_ids[part], case.labels.weights[part])
        rows = Rows(case.hidden[part], case.markov[part], case.markov_weight)
        parts.append(
            compute_distillation_loss(
                rows, teacher, labels, terms=MIXED, totals=totals, max_bytes=1 << 20
            )[0]
        )
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_bfloat16_products_keep_likely_tokens_exact() -> None:
    """Rounded logits near 20 would make p wrong by up to 6 %; shifted ones keep it to 0.4 %."""
    exact, rounded = Case(torch.float64), Case(torch.float64)
    for case in (exact, rounded):
        case.teacher.hidden *= 20
        kept = case.teacher.hidden.bfloat16().double() @ case.teacher.head.bfloat16().double().T
        case.teacher.log_normaliser = kept.logsumexp(-1).float()
        case.teacher.head = case.teacher.head.bfloat16()
        case.teacher.hidden = case.teacher.hidden.bfloat16()
    exact.teacher.head = exact.teacher.head.double()
    for name in ("hidden", "markov", "markov_weight"):
        setattr(exact, name, getattr(exact, name).detach().bfloat16().double())
    assert exact.teacher.log_normaliser.max() > 40
    losses, expected = rounded.fused(MIXED)[1], exact.fused(MIXED)[1]
    torch.testing.assert_close(
        losses.acceptance, expected.acceptance.to(losses.acceptance.dtype), atol=4e-3, rtol=0
    )


def test_nothing_is_computed_for_gradients_nobody_wants() -> None:
    case = Case()
    with torch.no_grad():
        loss, losses = case.fused(MIXED)
    assert not loss.requires_grad
    logits = case.hidden @ case.teacher.head.T + case.markov @ case.markov_weight.T
    best = case.full_probs[:, :DRAFT_VOCAB].argmax(-1)
    assert losses.greedy_match.tolist() == (logits.argmax(-1) == best).tolist()


def test_confidence_loss_is_least_at_the_acceptance_and_weighted() -> None:
    acceptance = torch.tensor([0.2, 0.9, 0.5])
    weights = torch.tensor([1.0, 0.5, 0.0])
    exact = torch.logit(acceptance)
    loss = compute_confidence_loss(exact, acceptance, weights, weights.sum())
    entropy = -(acceptance * acceptance.log() + (1 - acceptance) * (1 - acceptance).log())
    torch.testing.assert_close(loss, (entropy * weights).sum() / 1.5)
    worse = compute_confidence_loss(exact + 0.1, acceptance, weights, weights.sum())
    assert worse > loss


def test_position_weights_decay_and_stop_with_the_mask() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    weights = compute_position_weights(mask, 4.0)
    decayed = [1.0, 0.7788008, 0.6065307]
    torch.testing.assert_close(weights, torch.tensor([decayed, [1.0, 0.0, 0.0]]))
