"""Matrix products in bfloat16 whose likely results keep their precision.

Such a product is summed in float32 and rounded once, to 8 bits of the result: a logit of 20 is then
off by up to 0.06, and with it a likely token's probability by 6 %. Subtracting something close to
the largest logit inside the product leaves likely tokens with a logit near 0, where 8 bits are
plenty. The shift is two more columns, its head and its tail, against ones in the weight.
Shapes: R rows, d inputs, V outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (the name everybody uses)
from torch import Tensor


def widen(weight: Tensor) -> Tensor:
    """Return a weight [V, d] with the columns of ones that take the shift."""
    return F.pad(weight, (0, 2), value=1.0)


def multiply_shifted(inputs: Tensor, widened: Tensor, shift: Tensor) -> Tensor:
    """Return inputs [R, d] @ weight.T - shift [R, 1], in the type of the inputs."""
    head = shift.to(inputs.dtype)
    tail = (shift - head).to(inputs.dtype)
    return torch.cat([inputs, torch.stack([-head, -tail], 1)], 1) @ widened.T


def multiply_chosen(inputs: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """Return one product per row [R]: inputs with row `chosen` of the weight, summed in float32."""
    number = torch.promote_types(inputs.dtype, torch.float32)
    return (inputs.to(number) * weight[chosen]).sum(-1)
