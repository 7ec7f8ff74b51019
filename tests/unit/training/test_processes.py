"""Two processes on half the answers each have the gradient of one process with all of them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from forerun.training import session
from training_data import make_settings, make_target, write_data


def compute_gradient(data: Path, output: Path, sequences_per_step: int) -> torch.Tensor:
    """Take one unclipped step in float32 and return its gradient."""
    session.choose_compute_dtype = lambda _: torch.float32
    settings = make_settings(
        steps=1, sequences_per_step=sequences_per_step, clip_norm=1e9, tv_from=0.0, tv_ramp=0.0
    )
    trainer, processes = session.open_session(data, output, settings, lambda _: None)
    trainer.run()
    processes.leave()
    return trainer._optimiser.gradient


def train_part(rank: int, data: Path, output: Path, port: int) -> None:
    """Train as torchrun would start it."""
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    gradient = compute_gradient(data, output, sequences_per_step=1)
    torch.save(gradient, output.parent / f"gradient-{rank}.pt")


def test_two_processes_have_the_gradient_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "choose_compute_dtype", session.choose_compute_dtype)
    data = write_data(tmp_path / "data", make_target(tmp_path / "target"))
    whole = compute_gradient(data, tmp_path / "one", sequences_per_step=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(train_part, (data, tmp_path / "two", port), nprocs=2)
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"gradient-{rank}.pt"), whole)
    assert whole.norm() > 0.1
    assert sorted(path.name for path in (tmp_path / "two" / "checkpoints").iterdir()) == [
        "checkpoint-00000001.safetensors"
    ]
