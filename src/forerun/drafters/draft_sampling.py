"""How a draft model's tokens are chosen, so that the verifier accepts as many as it can.

Greedy requests draft the argmax. Coupled ones draw with the target's own noise at the absolute
position: where both models agree, so do the tokens. Standard ones draw from q = softmax(logits / T)
with noise of the draft stream, and q is kept, as the verifier needs the very tensor; those beyond
the memory for it draft the argmax, which is a one-hot q.
Evidence is the log-odds of max q: a function of the prefix, never of the drawn token.
Shapes: N requests, n of them that still draft, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.core import SamplingParams
from forerun.plan import DraftRequest
from forerun.sampling.filters import RowFilters, build_distribution
from forerun.sampling.method import choose_method
from forerun.sampling.noise import Stream, coupled_keys, derive_keys, uniform
from forerun.sampling.reduce import argmax_rows, draw
from forerun.sampling.scaled import ScaledRows

MAX_PROBS_BYTES = 512 * 2**20
MAX_EVIDENCE = 20.0
_MASK_64 = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftRules:
    """The verifier of unseeded sampled requests, and whether sampled requests draft the argmax."""

    default_method: str = "standard"
    is_greedy: bool = False

    def choose(self, params: SamplingParams) -> str:
        """Return how a request drafts: greedy, coupled or standard."""
        return "greedy" if self.is_greedy else choose_method(params, self.default_method)


class DraftSampler:
    """Chooses the tokens of one proposal; `probs` are the q of requests that drew from one."""

    def __init__(
        self, requests: Sequence[DraftRequest], rules: DraftRules, vocab_size: int
    ) -> None:
        self._requests = requests
        self._vocab_size = vocab_size
        self.probs: list[Tensor | None] = [None] * len(requests)
        self._methods = np.array(self._choose_methods(rules))
        params = [request.params for request in requests]
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        self._temperature = np.array(temperatures, dtype=np.float32)
        self._filters = RowFilters.from_params(params, np.ones(len(params), dtype=np.int64))
        self._seeds = np.array([r.seed & _MASK_64 for r in requests], dtype=np.uint64).view(
            np.int64
        )
        self._choices = np.array([r.choice_index for r in requests], dtype=np.int64)
        self._num_draws = np.array([r.num_draws for r in requests], dtype=np.int64)
        self._lengths = np.array([len(r.token_ids) for r in requests], dtype=np.int64)

    def choose(self, logits: Tensor, active: np.ndarray, place: int) -> tuple[Tensor, Tensor]:
        """Return token ids and evidence [n] of draft number `place` of the active requests.

        `logits` [n, V] float32 are raw; `active` [n] numbers the requests.
        """
        evidence = measure_evidence(logits, self._temperature[active])
        methods = self._methods[active]
        token_ids = torch.empty(len(active), dtype=torch.int64, device=logits.device)
        for method in np.unique(methods):
            rows = np.flatnonzero(methods == method)
            index = torch.from_numpy(rows).to(logits.device)
            own = logits if len(rows) == len(active) else logits[index]
            token_ids[index] = self._choose_alike(method, own, active[rows], place)
        return token_ids, evidence

    def _choose_methods(self, rules: DraftRules) -> list[str]:
        """Settle every request's method; q is given out in order while memory lasts."""
        left = MAX_PROBS_BYTES
        methods = []
        for index, request in enumerate(self._requests):
            method = rules.choose(request.params)
            if method == "standard":
                size = 4 * request.depth * self._vocab_size
                method = "standard" if size <= left else "greedy"
                left -= size
                if method == "standard":
                    self.probs[index] = torch.empty(0)
            methods.append(method)
        return methods

    def _choose_alike(self, method: str, logits: Tensor, active: np.ndarray, place: int) -> Tensor:
        if method == "greedy":
            return argmax_rows(logits)
        if method == "coupled":
            return self._choose_coupled(logits, active, place)
        return self._draw(logits, active, place)

    def _choose_coupled(self, logits: Tensor, active: np.ndarray, place: int) -> Tensor:
        positions = self._lengths[active] + place
        keys = coupled_keys(self._seeds[active], self._choices[active], positions)
        distribution = build_distribution(logits, self._filters.select(active))
        return distribution.sample_coupled(torch.from_numpy(keys).to(logits.device))

    def _draw(self, logits: Tensor, active: np.ndarray, place: int) -> Tensor:
        temperature = torch.from_numpy(self._temperature[active]).to(logits.device)
        probs = (logits / temperature[:, None]).softmax(dim=-1)
        for row, number in enumerate(active.tolist()):
            self._keep_probs(number, place, probs[row])
        identity = (self._seeds[active], self._choices[active], self._num_draws[active])
        noise = uniform(derive_keys(Stream.DRAFT, *identity, place))
        return draw(probs, torch.from_numpy(noise).to(logits.device))

    def _keep_probs(self, number: int, place: int, probs: Tensor) -> None:
        """Copy one row of q to its request's own memory, which lives until it drafts again."""
        kept = self.probs[number]
        assert kept is not None
        if not len(kept):
            kept = probs.new_empty(self._requests[number].depth, len(probs))
            self.probs[number] = kept
        kept[place] = probs


def measure_evidence(logits: Tensor, temperature: np.ndarray) -> Tensor:
    """Return the log-odds of max q [n] of float32 logits [n, any] at temperatures [n]."""
    peaks = ScaledRows.measure(logits, temperature).peak_prob.squeeze(1).double()
    evidence = (peaks.log() - torch.log1p(-peaks)).clamp_(-MAX_EVIDENCE, MAX_EVIDENCE)
    return evidence.float()
