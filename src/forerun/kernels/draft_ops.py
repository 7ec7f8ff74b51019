"""The sequential head of a block drafter, for rows that draft by argmax: one native call per block.

The PyTorch functions are the definition, and what is run where the kernels cannot. Everything is
computed in float32 from tables of the model's type. Logits must not be NaN.
Shapes: N requests, g positions of a block, V target and Vd draft vocabulary, r rank, d hidden size.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from forerun.kernels import Kernels
from forerun.kernels.abi import DTYPE_CODES, UNKNOWN_TOKEN, DraftParams
from forerun.kernels.packed import PackedMemory, PackedWeight, measure_packed, pack
from forerun.kernels.sampling_ops import find_largest


@dataclass(frozen=True, slots=True, eq=False)
class SequentialHead:
    """What a drafted token depends on besides its base logits; made once per drafter.

    `markov_w1` [V, r] and `markov_w2` [Vd, r] are float32 or bfloat16; None: on nothing. `packed`
    is markov_w2 as the kernel reads it. `d2t` [Vd] holds target ids; None: they are the draft ids.
    """

    markov_w1: Tensor | None
    markov_w2: Tensor | None
    d2t: Tensor | None
    packed: PackedWeight | None

    @classmethod
    def build(
        cls,
        markov_w1: Tensor | None = None,
        markov_w2: Tensor | None = None,
        d2t: Tensor | None = None,
    ) -> SequentialHead:
        """Return the head; packs a copy of markov_w2 where the kernels can read the tables."""
        d2t = None if d2t is None else d2t.long().contiguous()
        if markov_w1 is None or markov_w2 is None:
            return cls(None, None, d2t, None)
        assert markov_w1.shape[1] == markov_w2.shape[1], "ranks of W1 and W2 differ"
        assert d2t is not None or len(markov_w1) >= len(markov_w2), "draft ids need a d2t"
        if d2t is not None and not bool(((d2t >= 0) & (d2t < len(markov_w1))).all()):
            raise ValueError(f"d2t must hold target ids, 0 .. {len(markov_w1) - 1}")
        return cls(markov_w1.contiguous(), markov_w2, d2t, _pack_table(markov_w1, markov_w2))

    def find_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Return target ids of draft ids, of any shape."""
        return draft_ids if self.d2t is None else self.d2t[draft_ids]


@dataclass(frozen=True, slots=True, eq=False)
class ConfidenceParams:
    """sigmoid(weight . [h ; W1[token before]] + bias); weight [d] reads h alone."""

    hidden: Tensor  # [N, g, d], float32 or bfloat16
    weight: Tensor  # [d + r] or [d] float32
    bias: float = 0.0


def draft_block(
    base_logits: Tensor,
    anchor_ids: Tensor,
    head: SequentialHead,
    confidence: ConfidenceParams | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return target ids [N, g] int64 and how likely each is accepted, [N, g] float32, if asked.

    Token k is the first argmax of base_logits[:, k] [Vd] float32 + W2 W1[token k - 1]; the anchor
    comes before token 0. Confidence does not depend on the token it is for. Raises IndexError for
    an anchor beyond the vocabulary.
    """
    if head.markov_w1 is None:
        rates = None if confidence is None else _rate(confidence, confidence.hidden.float())
        return head.find_target_ids(_find_largest(base_logits)), rates
    kernels = _find_usable(base_logits, head, confidence)
    if kernels is None:
        return draft_block_reference(base_logits, anchor_ids, head, confidence)
    return _draft_native(kernels, base_logits, anchor_ids, head, confidence)


def draft_block_reference(
    base_logits: Tensor,
    anchor_ids: Tensor,
    head: SequentialHead,
    confidence: ConfidenceParams | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute draft_block with a Markov table in PyTorch."""
    assert head.markov_w1 is not None
    assert head.markov_w2 is not None
    table = head.markov_w2.float().T
    previous, token_ids, rates = anchor_ids, [], []
    for position in range(base_logits.shape[1]):
        embedding = head.markov_w1[previous].float()
        if confidence is not None:
            rows = confidence.hidden[:, position].float()
            reads_embedding = len(confidence.weight) > rows.shape[1]
            inputs = torch.cat((rows, embedding), dim=-1) if reads_embedding else rows
            rates.append(_rate(confidence, inputs))
        logits = base_logits[:, position] + embedding @ table
        previous = head.find_target_ids(logits.argmax(dim=-1))
        token_ids.append(previous)
    return torch.stack(token_ids, dim=1), torch.stack(rates, dim=1) if rates else None


def _draft_native(
    kernels: Kernels,
    base_logits: Tensor,
    anchor_ids: Tensor,
    head: SequentialHead,
    confidence: ConfidenceParams | None,
) -> tuple[Tensor, Tensor | None]:
    assert head.markov_w1 is not None
    assert head.packed is not None
    num_rows, num_positions, _ = base_logits.shape
    token_ids = torch.empty(num_rows, num_positions, dtype=torch.int64)
    anchor_ids = anchor_ids.contiguous()
    params = DraftParams(
        bias_table=head.packed.describe(None),
        embedding=head.markov_w1.data_ptr(),
        base=base_logits.data_ptr(),
        anchor_ids=anchor_ids.data_ptr(),
        target_ids=None if head.d2t is None else head.d2t.data_ptr(),
        token_ids=token_ids.data_ptr(),
        row_stride=base_logits.stride(0),
        position_stride=base_logits.stride(1),
        num_rows=num_rows,
        num_positions=num_positions,
        vocab_size=len(head.markov_w1),
        dtype=DTYPE_CODES[head.markov_w1.dtype],
        num_threads=torch.get_num_threads(),
    )
    rates = None if confidence is None else torch.empty(num_rows, num_positions)
    if confidence is not None and rates is not None:
        _describe_confidence(params, confidence, rates)
    scratch = torch.empty(kernels.draft_bytes(byref(params)), dtype=torch.uint8)
    params.scratch = scratch.data_ptr()
    if kernels.draft(byref(params)) == UNKNOWN_TOKEN:
        raise IndexError(f"anchor ids must lie in 0 .. {len(head.markov_w1) - 1}")
    return token_ids, rates


def _describe_confidence(params: DraftParams, confidence: ConfidenceParams, rates: Tensor) -> None:
    hidden, weight = confidence.hidden, confidence.weight
    params.hidden = hidden.data_ptr()
    params.hidden_size = hidden.shape[2]
    params.hidden_dtype = DTYPE_CODES[hidden.dtype]
    params.confidence_weight = weight.data_ptr()
    params.reads_embedding = len(weight) > hidden.shape[2]
    params.confidence_bias = confidence.bias
    params.confidence = rates.data_ptr()


def _find_usable(
    base_logits: Tensor, head: SequentialHead, confidence: ConfidenceParams | None
) -> Kernels | None:
    """Return the kernels if they can read all this where it lies, and there is something to do."""
    if head.packed is None or not base_logits.numel():
        return None
    if base_logits.dtype != torch.float32 or base_logits.stride(2) != 1:
        return None
    if confidence is not None:
        hidden, weight = confidence.hidden, confidence.weight
        readable = hidden.dtype in DTYPE_CODES and weight.dtype == torch.float32
        if not readable or not hidden.is_contiguous() or not weight.is_contiguous():
            return None
    return head.packed.kernels


def _pack_table(markov_w1: Tensor, markov_w2: Tensor) -> PackedWeight | None:
    num_bytes = measure_packed(markov_w2)
    if num_bytes is None or not markov_w1.is_cpu or markov_w1.dtype != markov_w2.dtype:
        return None
    memory = torch.empty(PackedMemory.count_bytes([num_bytes]), dtype=torch.uint8)
    return pack(markov_w2, PackedMemory(memory))


def _find_largest(base_logits: Tensor) -> Tensor:
    """Return the first index of the maximum over the last dimension."""
    rows = base_logits.flatten(0, 1)
    found = find_largest(rows)
    ids = rows.argmax(dim=-1) if found is None else found[0]
    return ids.view(base_logits.shape[:2])


def _rate(confidence: ConfidenceParams, inputs: Tensor) -> Tensor:
    return torch.sigmoid(inputs @ confidence.weight + confidence.bias)
