"""One batch through the network to the loss, in the type the device computes fastest in.

Shapes: A blocks, g positions, R = A g rows, d hidden_size, r Markov rank, V target and Vd draft
vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.drafters.dspark.network import DSparkNetwork
from forerun.kernels.cpu import read_cpu_flags
from forerun.training.distributed import Processes
from forerun.training.objective.batches import TrainBatch
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

_FAST_BF16 = frozenset({"avx512_bf16", "amx_bf16"})


@dataclass(slots=True)
class BatchLoss:
    """The loss to go backward from, and what it is made of: rows of blocks of `block_size`."""

    total: Tensor
    confidence: Tensor
    rows: RowLosses
    labels: RowLabels
    block_size: int


class Objective:
    """The loss of a network's batches. Holds the frozen head in the type of products."""

    def __init__(
        self,
        network: DSparkNetwork,
        *,
        dtype: torch.dtype,
        loss_decay: float,
        max_bytes: int,
    ) -> None:
        self._network = network
        self._dtype = dtype
        self._loss_decay = loss_decay
        self._max_bytes = max_bytes
        self._head = network.lm_head.weight.detach().to(dtype)
        self._draft_ids = network.d2t.new_full((network.config.vocab_size,), -1)
        self._draft_ids[network.d2t] = torch.arange(len(network.d2t), device=network.d2t.device)

    def compute(
        self, batch: TrainBatch, terms: LossWeights, processes: Processes | None = None
    ) -> BatchLoss:
        """Return the loss of a batch, divided by what the batches of all processes weigh."""
        rows, confidence_logits = self._run_network(batch)
        weights = compute_position_weights(batch.mask, self._loss_decay).view(-1)
        labels = RowLabels(self._draft_ids[batch.labels.view(-1)], weights)
        totals = labels.compute_totals()
        if processes is not None:
            totals = processes.add_up(totals)
        teacher = Teacher(self._head, batch.hidden, batch.log_normaliser)
        total, losses = compute_distillation_loss(
            rows, teacher, labels, terms=terms, totals=totals, max_bytes=self._max_bytes
        )
        confidence = total.new_zeros(())
        if confidence_logits is not None:
            confidence = compute_confidence_loss(
                confidence_logits, losses.acceptance, weights, totals[1]
            )
        return BatchLoss(
            total=total + terms.confidence * confidence,
            confidence=confidence,
            rows=losses,
            labels=labels,
            block_size=batch.mask.shape[1],
        )

    def _run_network(self, batch: TrainBatch) -> tuple[Rows, Tensor | None]:
        """Return what logits are made of, and the logits [R] of the confidence head."""
        network, markov, mixed, confidence = self._network, None, None, None
        with self._autocast():
            hidden = network(batch.blocks)
            if network.markov_head is not None:
                markov = network.markov_head.embed(batch.previous)
                mixed = network.markov_head.mix_block(markov, hidden).flatten(0, 1)
            if network.confidence_head is not None:
                confidence = network.confidence_head(hidden, markov).view(-1)
        weight = None if network.markov_head is None else network.markov_head.markov_w2.weight
        return Rows(hidden.flatten(0, 1), mixed, weight), confidence

    def _autocast(self) -> AbstractContextManager[object]:
        kind = self._head.device.type
        return torch.autocast(kind, self._dtype, enabled=self._dtype != torch.float32)


def choose_compute_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where products in it are faster, float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16
    is_fast = device.type == "cpu" and not _FAST_BF16.isdisjoint(read_cpu_flags())
    return torch.bfloat16 if is_fast else torch.float32
