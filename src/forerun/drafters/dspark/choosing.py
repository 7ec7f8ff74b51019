"""The tokens of computed blocks, slot by slot: base logits, Markov bias, choice, next slot.

Requests that draft the argmax go in one call per block (kernels/draft_ops.py); the others slot by
slot, as a draft model's tokens are chosen (draft_sampling.py), over the target's vocabulary: what a
reduced draft vocabulary leaves out has probability zero, and noise goes by the target's token ids.
Confidence (DSpark, equation 7) and evidence of a slot are functions of the tokens before it.
Shapes: N requests, n of them that still draft, R block rows, g drafts, d hidden_size, V and Vd
target and draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.draft_sampling import DraftRules, DraftSampler, measure_evidence
from forerun.drafters.dspark.heads import ConfidenceHead, MarkovHead
from forerun.kernels.draft_ops import ConfidenceParams, SequentialHead, draft_block
from forerun.plan import DraftRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockHeads:
    """What follows the backbone; the confidence head is float32.

    `sequential` drafts whole blocks by argmax; None: heads like these go slot by slot.
    """

    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    sequential: SequentialHead | None
    d2t: Tensor | None  # [Vd] int64 target ids; None: the vocabularies are one
    vocab_size: int  # V
    confidence_weight: Tensor  # [d + r] or [d]; empty without a head
    confidence_bias: float

    @classmethod
    def build(
        cls,
        markov: MarkovHead | None,
        confidence: ConfidenceHead | None,
        d2t: Tensor | None,
        vocab_size: int,
    ) -> BlockHeads:
        """Return the heads, prepared for drafting whole blocks where they allow it."""
        sequential = None
        if markov is None:
            sequential = SequentialHead.build(d2t=d2t)
        elif type(markov) is MarkovHead and confidence is not None:
            # NOTE: without a confidence head every slot's biased logits are wanted, for evidence.
            w1, w2 = markov.markov_w1.weight.detach(), markov.markov_w2.weight.detach()
            sequential = SequentialHead.build(w1, w2, d2t)
        proj = None if confidence is None else confidence.proj
        return cls(
            markov=markov,
            confidence=confidence,
            sequential=sequential,
            d2t=d2t,
            vocab_size=vocab_size,
            confidence_weight=torch.empty(0) if proj is None else proj.weight.detach()[0],
            confidence_bias=0.0 if proj is None or proj.bias is None else float(proj.bias),
        )

    def widen(self, logits: Tensor) -> Tensor:
        """Return draft logits [n, Vd] as logits of the target's tokens [n, V]."""
        if self.d2t is None:
            return logits
        wide = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return wide.index_copy_(1, self.d2t, logits)

    def score(self, hidden: Tensor, previous_ids: Tensor) -> Tensor | None:
        """Return the confidence [n] of slots [n, d] after these tokens, if there is a head."""
        if self.confidence is None:
            return None
        embedding = None
        if self.markov is not None and self.confidence.reads_markov:
            embedding = self.markov.embed(previous_ids)
        return self.confidence(hidden.float(), embedding).sigmoid()

    def drafts_whole_blocks(self, rules: DraftRules, request: DraftRequest) -> bool:
        """Return whether a request's block takes one call."""
        return self.sequential is not None and rules.choose(request.params) == "greedy"


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The slots that predict, request after request; those of request i start at starts[i]."""

    hidden: Tensor  # [R, d], after the final norm
    logits: Tensor  # [R, Vd] float32, before the Markov bias
    starts: np.ndarray  # [N] int64

    def select(self, first: int, stop: int) -> BlockRows:
        """Return the rows of requests first .. stop - 1."""
        begin = int(self.starts[first])
        end = int(self.starts[stop]) if stop < len(self.starts) else len(self.hidden)
        starts = self.starts[first:stop] - begin
        return BlockRows(self.hidden[begin:end], self.logits[begin:end], starts)


@dataclass(slots=True)
class BlockDraft:
    """What one request gets; `scores` are confidences with a head, else evidence."""

    token_ids: list[int]
    scores: list[float]
    probs: Tensor | None = None


def choose_blocks(
    heads: BlockHeads, requests: Sequence[DraftRequest], rows: BlockRows
) -> list[BlockDraft]:
    """Return the argmax drafts of requests whose blocks are equally deep."""
    assert heads.sequential is not None
    by_request = (x.unflatten(0, (len(requests), -1)) for x in (rows.hidden, rows.logits))
    hidden, logits = by_request
    anchors = torch.tensor([r.token_ids[-1] for r in requests], device=logits.device)
    confidence = None
    if heads.confidence is not None:
        confidence = ConfidenceParams(hidden, heads.confidence_weight, heads.confidence_bias)
    token_ids, scores = draft_block(logits, anchors, heads.sequential, confidence)
    if scores is None:
        ones = np.ones(len(rows.logits), np.float32)
        scores = measure_evidence(rows.logits, ones).view(token_ids.shape)
    pairs = zip(token_ids.tolist(), scores.tolist(), strict=True)
    return [BlockDraft(own, own_scores) for own, own_scores in pairs]


def choose_in_turn(
    heads: BlockHeads,
    rules: DraftRules,
    requests: Sequence[DraftRequest],
    depths: np.ndarray,  # [N], at least 1
    rows: BlockRows,
) -> list[BlockDraft]:
    """Return depths[i] tokens for every request, drawn as its parameters say."""
    sampler = DraftSampler(requests, rules, heads.vocab_size)
    device = rows.logits.device
    active = np.arange(len(requests))
    previous = torch.tensor([request.token_ids[-1] for request in requests], device=device)
    state = None if heads.markov is None else heads.markov.start(len(requests))
    owners, chosen = [], []
    for place in range(int(depths.max())):
        index = torch.from_numpy(rows.starts[active] + place).to(device)
        hidden, logits = rows.hidden[index], rows.logits[index]
        if heads.markov is not None:
            bias, state = heads.markov.step(previous, hidden, state)
            logits += bias
        scores = heads.score(hidden, previous)
        token_ids, evidence = sampler.choose(heads.widen(logits), active, place)
        scores = evidence if scores is None else scores
        owners.append(active)
        chosen.append(torch.stack([token_ids.double(), scores.double()], dim=1))
        goes_on = depths[active] > place + 1
        kept = torch.from_numpy(np.flatnonzero(goes_on)).to(device)
        active, previous = active[goes_on], token_ids[kept]
        state = None if state is None else state[kept]
    return _collect(sampler.probs, np.concatenate(owners), torch.cat(chosen))


def _collect(
    probs: Sequence[Tensor | None], owners: np.ndarray, chosen: Tensor
) -> list[BlockDraft]:
    """Give (token, score) pairs, in the order of their places, to those who own them."""
    drafts = [BlockDraft([], [], own) for own in probs]
    # One transfer for all tokens: until here the host knows none of them.
    for owner, (token_id, score) in zip(owners, chosen.tolist(), strict=True):
        drafts[owner].token_ids.append(int(token_id))
        drafts[owner].scores.append(score)
    return drafts
