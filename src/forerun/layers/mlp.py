"""Gated MLP: down(act(gate(x)) * up(x)), gate and up merged into one projection."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from forerun.layers.linear import Linear, WeightOptions


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


class GatedMLP(nn.Module):
    """The feed-forward block of every supported family."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        options: WeightOptions,
        *,
        activation: str,
        bias: bool,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, options, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, options, bias=bias)
        self.activate = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [num_tokens, hidden_size] to the same shape."""
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        return self.down(self.activate(gate).mul_(up))
