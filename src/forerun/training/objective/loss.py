"""The drafter's loss over a vocabulary, with closed-form gradients and no vocabulary-sized memory.

Per row, with q the draft's and p the target's distribution at temperature 1 (paper section 3.3):
hard CE -log q(label); soft CE -sum p' log q, p' = p renormalised over the draft vocabulary;
L1 sum |q - p| + p's mass outside the draft vocabulary. 1 - L1 / 2 = sum min(p, q) is the chance
that the target accepts the draft. Gradients by the logits: q - onehot; q - p'; q (s - sum q s) with
s = sign(q - p). So one pass over chunks of rows computes loss and gradients, and nothing of the
size [rows, vocabulary] outlives its chunk.
Shapes: R rows, d hidden_size, r Markov rank, Vd draft vocabulary, n rows of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name)
from torch import Tensor
from torch.autograd.function import once_differentiable

from forerun.training.objective.products import multiply_chosen, multiply_shifted, widen

_MIN_WEIGHT = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """What each term counts; a term with weight 0 has no gradient."""

    hard: float
    soft: float
    l1: float
    confidence: float


@dataclass(slots=True)
class Teacher:
    """What the target says about every row, and the head that says it.

    `head` is the frozen [Vd, d] in the type products are computed in; `log_normaliser` the log of
    the sum over the whole vocabulary, so that p is exact over a reduced one.
    """

    head: Tensor  # [Vd, d]
    hidden: Tensor  # [R, d]
    log_normaliser: Tensor  # [R] float32


@dataclass(slots=True)
class Rows:
    """The draft's side: logits are hidden @ head.T + markov @ markov_weight.T."""

    hidden: Tensor  # [R, d]
    markov: Tensor | None  # [R, r]
    markov_weight: Tensor | None  # [Vd, r]


@dataclass(slots=True)
class RowLabels:
    """What a row is held against, and how much it counts.

    `draft_ids` is -1 where the label is outside the draft vocabulary: such a row has no hard CE.
    """

    draft_ids: Tensor  # [R]
    weights: Tensor  # [R]; 0: not counted

    def compute_totals(self) -> Tensor:
        """Return the sums [2] the terms are divided by: of rows with a hard label, of all rows."""
        inside = torch.where(self.draft_ids >= 0, self.weights, 0.0)
        return torch.stack([inside.sum(), self.weights.sum()])


@dataclass(slots=True)
class RowLosses:
    """Per-row values, detached; `acceptance` is sum min(p, q).

    `greedy_match` says whether the likeliest draft is the target's likeliest token of the draft
    vocabulary; known only where no gradients are wanted.
    """

    hard: Tensor  # [R]
    soft: Tensor  # [R]
    l1: Tensor  # [R]
    acceptance: Tensor  # [R]
    greedy_match: Tensor | None  # [R] bool


@dataclass(slots=True)
class _Plan:
    """What the autograd function needs beside tensors it gives gradients of."""

    teacher: Teacher
    labels: RowLabels
    scales: Tensor  # [3, R]: what a row's hard, soft and L1 loss count in the total
    terms: LossWeights
    chunk_rows: int
    losses: RowLosses


def compute_distillation_loss(
    rows: Rows,
    teacher: Teacher,
    labels: RowLabels,
    *,
    terms: LossWeights,
    totals: Tensor,
    max_bytes: int,
) -> tuple[Tensor, RowLosses]:
    """Return the weighted hard, soft and L1 loss, and what every row contributed.

    A float32 tensor over the vocabulary holds as many rows as fit `max_bytes`.
    """
    chunk_rows = max(1, max_bytes // (4 * len(teacher.head)))
    by_hard, by_all = labels.weights / totals.clamp_min(_MIN_WEIGHT)[:, None]
    by_hard = torch.where(labels.draft_ids >= 0, by_hard, 0.0)
    scales = torch.stack([terms.hard * by_hard, terms.soft * by_all, terms.l1 * by_all])
    # Inside the function autograd is off, and its inputs do not say whether it was on.
    losses = _empty_losses(len(rows.hidden), scales, is_training=torch.is_grad_enabled())
    plan = _Plan(teacher, labels, scales, terms, chunk_rows, losses)
    inputs = (rows.hidden, rows.markov, rows.markov_weight)
    loss: Tensor = _Distillation.apply(*inputs, plan)  # type: ignore[no-untyped-call]
    return loss, plan.losses


def compute_confidence_loss(
    logits: Tensor, acceptance: Tensor, weights: Tensor, total: Tensor
) -> Tensor:
    """Return the weighted mean BCE of confidence logits [R] against the acceptance chance [R]."""
    losses = F.binary_cross_entropy_with_logits(
        logits.to(acceptance.dtype), acceptance, reduction="none"
    )
    return (losses * weights).sum() / total.clamp_min(_MIN_WEIGHT)


def compute_position_weights(mask: Tensor, loss_decay: float) -> Tensor:
    """Return exp(-k / loss_decay) at counted positions k of a block, 0 elsewhere; [A, g]."""
    offsets = torch.arange(mask.shape[1], device=mask.device, dtype=torch.float32)
    return torch.exp(-offsets / loss_decay) * mask


class _Distillation(torch.autograd.Function):
    """The loss, with its gradients already computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, markov: Tensor | None, markov_weight: Tensor | None, plan: _Plan
    ) -> Tensor:
        teacher = plan.teacher
        kind = teacher.head.dtype
        inputs, weight = _join(hidden, markov, kind), _join(teacher.head, markov_weight, kind)
        widened, teacher_widened = widen(weight), widen(teacher.head)
        teacher_rows = teacher.hidden.to(kind)
        shift = multiply_chosen(inputs, weight, plan.labels.draft_ids.clamp_min(0))
        is_training = plan.losses.greedy_match is None
        d_inputs = torch.empty_like(inputs) if is_training else None
        d_weight = None
        if is_training and markov_weight is not None:
            d_weight = torch.zeros_like(markov_weight)
        for start in range(0, len(hidden), plan.chunk_rows):
            part = slice(start, start + plan.chunk_rows)
            normaliser = teacher.log_normaliser[part]
            log_p = multiply_shifted(teacher_rows[part], teacher_widened, normaliser)
            logits = multiply_shifted(inputs[part], widened, shift[part])
            d_logits = _compute_chunk(logits, log_p, plan, part)
            if d_inputs is None or d_logits is None:
                continue
            d_logits = d_logits.to(kind)
            d_inputs[part] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ inputs[part, hidden.shape[1] :]
        ctx.width = hidden.shape[1]
        ctx.save_for_backward(d_inputs, d_weight)
        losses = torch.stack([plan.losses.hard, plan.losses.soft, plan.losses.l1])
        return (losses * plan.scales).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_inputs, d_weight = ctx.saved_tensors
        d_hidden = d_inputs[:, : ctx.width] * d_loss
        if d_weight is None:
            return d_hidden, None, None, None
        return d_hidden, d_inputs[:, ctx.width :] * d_loss, d_weight * d_loss, None


def _join(left: Tensor, right: Tensor | None, kind: torch.dtype) -> Tensor:
    return left.to(kind) if right is None else torch.cat([left.to(kind), right.to(kind)], 1)


def _compute_chunk(logits: Tensor, log_p: Tensor, plan: _Plan, part: slice) -> Tensor | None:
    """Fill in the losses of some rows [n, Vd]; return the loss's gradient by their logits, if any.

    Overwrites both arguments.
    """
    losses, number = plan.losses, plan.scales.dtype
    logits, log_p = logits.to(number), log_p.to(number)
    labels = plan.labels.draft_ids[part, None]
    if losses.greedy_match is not None:
        losses.greedy_match[part] = logits.argmax(-1) == log_p.argmax(-1)
    log_q = F.log_softmax(logits, -1)
    p, q = log_p.exp_(), log_q.exp()
    mass = p.sum(-1, keepdim=True)
    losses.hard[part] = -log_q.gather(1, labels.clamp_min(0))[:, 0] * (labels[:, 0] >= 0)
    losses.soft[part] = -torch.linalg.vecdot(p, log_q) / mass[:, 0]
    difference = torch.sub(q, p, out=log_q)
    sign = difference.sign()
    outside = (1 - mass[:, 0]).clamp_min(0)
    losses.l1[part] = torch.linalg.vecdot(difference, sign) + outside
    losses.acceptance[part] = (1 - losses.l1[part] / 2).clamp(0, 1)
    if losses.greedy_match is not None:
        return None
    hard, soft, l1 = plan.scales[:, part, None]
    if plan.terms.l1:
        sign.sub_(torch.linalg.vecdot(q, sign)[:, None]).mul_(l1).add_(hard + soft).mul_(q)
    else:
        sign = q.mul_(hard + soft)
    sign.addcmul_(p, soft / mass, value=-1)
    return sign.scatter_add_(1, labels.clamp_min(0), -hard)


def _empty_losses(count: int, like: Tensor, *, is_training: bool) -> RowLosses:
    hard, soft, l1, acceptance = like.new_empty(4, count)
    match = None if is_training else like.new_zeros(count, dtype=torch.bool)
    return RowLosses(hard, soft, l1, acceptance, match)
