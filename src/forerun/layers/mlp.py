"""Gated MLP: down(act(gate(x)) * up(x)), gate and up merged into one projection."""

from __future__ import annotations

from torch import Tensor

from forerun.kernels.ops import gate
from forerun.layers.linear import Block, Linear, WeightOptions


class GatedMLP(Block):
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
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Map rows [num_tokens, hidden_size] to the same shape."""
        return self.down(gate(self.gate_up(x), self.activation))
