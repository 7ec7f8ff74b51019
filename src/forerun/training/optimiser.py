"""AdamW over one flat float32 tensor that all trainable parameters are views of.

One tensor makes clipping, averaging, all-reduce and checkpoints one operation each. The average of
the weights along the run is what is evaluated and exported: it is worth a lower learning rate.
Shapes: P trainable numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.training.settings import TrainSettings

_BETA1 = 0.9
_TINY = 1e-6


class Optimiser:
    """Owns the trainable numbers, their gradient, AdamW's moments and the running average."""

    def __init__(self, network: nn.Module, settings: TrainSettings) -> None:
        params = [p for p in network.parameters() if p.requires_grad]
        self._flat = nn.Parameter(torch.cat([p.detach().flatten() for p in params]).float())
        self.gradient = torch.zeros_like(self._flat.data)
        self._flat.grad = self.gradient
        _make_views(params, self._flat.data, self.gradient)
        self._adamw = torch.optim.AdamW(
            [self._flat],
            lr=settings.learning_rate,
            betas=(_BETA1, settings.beta2),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._clip_norm = settings.clip_norm
        self._averaging = settings.averaging
        self._average = self._flat.detach().clone() if settings.averaging else None

    @property
    def values(self) -> Tensor:
        """The trainable numbers [P]; the network's parameters are views of it."""
        return self._flat.data

    def zero_gradient(self) -> None:
        """Forget the gradient."""
        self.gradient.zero_()

    def measure_gradient(self) -> float:
        """Return the gradient's norm, before clipping."""
        return float(self.gradient.norm())

    def step(self, num_done: int, learning_rate: float, gradient_norm: float) -> None:
        """Clip the gradient, update the parameters and their average after `num_done` steps."""
        if gradient_norm > self._clip_norm:
            self.gradient.mul_(self._clip_norm / (gradient_norm + _TINY))
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        if self._average is not None:
            # A young average would mostly hold the random start.
            decay = min(self._averaging, (1 + num_done) / (10 + num_done))
            self._average.lerp_(self._flat.detach(), 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the network the averaged parameters for a while."""
        if self._average is None:
            yield
            return
        latest = self.values.clone()
        self.values.copy_(self._average)
        try:
            yield
        finally:
            self.values.copy_(latest)

    def pack_state(self) -> dict[str, Tensor]:
        """Return everything a resumed run needs; the tensors are live."""
        tensors = {"values": self.values}
        moments = self._adamw.state.get(self._flat, {})
        tensors |= {name: value for name, value in moments.items() if isinstance(value, Tensor)}
        if self._average is not None:
            tensors["average"] = self._average
        return tensors

    def unpack_state(self, tensors: dict[str, Tensor]) -> None:
        """Go on from a packed state; raises ConfigError where it is another network's."""
        if tensors["values"].shape != self.values.shape:
            raise ConfigError(
                f"the checkpoint holds {len(tensors['values'])} trainable numbers, this network "
                f"has {len(self.values)}; give the settings it was trained with."
            )
        self.values.copy_(tensors["values"])
        if self._average is not None:
            self._average.copy_(tensors.get("average", tensors["values"]))
        names = ("step", "exp_avg", "exp_avg_sq")
        if all(name in tensors for name in names):
            device = self.values.device
            state = {name: tensors[name].to(device).clone() for name in names}
            self._adamw.state[self._flat] = state


def _make_views(params: list[nn.Parameter], values: Tensor, gradient: Tensor) -> None:
    """Let every parameter and its gradient be a view of the flat tensors."""
    first = 0
    for param in params:
        part = slice(first, first + param.numel())
        param.data = values[part].view_as(param)
        param.grad = gradient[part].view_as(param)
        first = part.stop
