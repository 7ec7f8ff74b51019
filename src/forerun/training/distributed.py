"""Several processes of torchrun, each on answers of its own; one process is the case of size 1.

Gradients and the sums that losses are divided by are added up over all processes, so the result is
that of one process with all answers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Processes:
    """Rank, size and the one collective training needs."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, device: torch.device) -> Processes:
        """Return the processes torchrun started; alone without it."""
        if not dist.is_torchelastic_launched():
            return cls()
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_main(self) -> bool:
        """Whether this process reports and writes files."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes; return it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def leave(self) -> None:
        """End the group."""
        if self.size > 1:
            dist.destroy_process_group()

    def choose_device(self, device: torch.device) -> torch.device:
        """Return this process's own device of a kind of which there may be several."""
        if self.size == 1 or device.type != "cuda":
            return device
        return torch.device("cuda", self.rank % torch.cuda.device_count())
