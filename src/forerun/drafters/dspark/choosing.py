"""The tokens of computed blocks, slot by slot: base logits, Markov bias, choice, next slot.

Confidence (DSpark, equation 7) and evidence of a slot are functions of the tokens before it. Tokens
are chosen as a draft model's are (draft_sampling.py), over the target's vocabulary: what a reduced
draft vocabulary leaves out has probability zero, and noise goes by the target's token ids.
Shapes: N requests, n of them that still draft, R block rows, d hidden_size, V and Vd target and
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.drafters.draft_sampling import DraftRules, DraftSampler
from forerun.drafters.dspark.heads import ConfidenceHead, MarkovHead
from forerun.plan import DraftRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockHeads:
    """What follows the backbone; the confidence head is float32."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    d2t: Tensor | None  # [Vd] int64 target ids; None: the vocabularies are one
    vocab_size: int  # V

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


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The slots that predict, request after request; those of request i start at starts[i]."""

    hidden: Tensor  # [R, d], after the final norm
    logits: Tensor  # [R, Vd] float32, before the Markov bias
    starts: np.ndarray  # [N] int64


@dataclass(slots=True)
class BlockDraft:
    """What one request gets; `scores` are confidences with a head, else evidence."""

    token_ids: list[int]
    scores: list[float]
    probs: Tensor | None = None


def choose_block(
    heads: BlockHeads,
    rules: DraftRules,
    requests: Sequence[DraftRequest],
    depths: np.ndarray,  # [N], at least 1
    rows: BlockRows,
) -> list[BlockDraft]:
    """Return depths[i] tokens for every request."""
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
