"""The training loop: steps, reports, evaluations, checkpoints, and when to stop.

Everything random follows from the seed and the number of the step, so a resumed run takes the very
steps an uninterrupted one would have. The loop knows the clock only through `clock`.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from forerun.drafters.dspark.checkpoint import save_checkpoint
from forerun.drafters.dspark.network import DSparkNetwork
from forerun.errors import ConfigError
from forerun.logs import get_logger
from forerun.training.answers.dataset import Dataset
from forerun.training.answers.shards import TargetSequence
from forerun.training.checkpoints import Checkpoint, find_checkpoint, write_checkpoint
from forerun.training.distributed import Processes
from forerun.training.objective.batch_loss import Objective
from forerun.training.objective.batches import TrainBatch, build_batch
from forerun.training.objective.meter import Measurement, Meter
from forerun.training.optimiser import Optimiser
from forerun.training.schedule import compute_learning_rate, compute_loss_weights
from forerun.training.settings import TrainSettings

logger = get_logger(__name__)

_REPORT_STEPS = 25
_SEED_STRIDE = 2**32
CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainReport:
    """How far training is and what the steps since the last report, or an evaluation, showed."""

    kind: str  # "train" or "heldout"
    num_done: int
    num_steps: int
    measured: Measurement
    learning_rate: float
    tokens_per_s: float
    train_s: float
    left_s: float


class Trainer:
    """One run over a dataset. Writes checkpoints and the drafter below `output`."""

    def __init__(
        self,
        network: DSparkNetwork,
        dataset: Dataset,
        settings: TrainSettings,
        *,
        output: Path,
        dtype: torch.dtype,
        report: Callable[[TrainReport], None],
        processes: Processes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_done = 0
        self._network = network
        self._dataset = dataset
        self._settings = settings
        self._output = output
        self._report = report
        self._processes = processes or Processes()
        self._clock = clock
        self._device = network.d2t.device
        self._optimiser = Optimiser(network, settings)
        self._objective = Objective(
            network,
            dtype=dtype,
            loss_decay=settings.loss_decay,
            max_bytes=settings.loss_memory_mb << 20,
        )
        self._train_s = 0.0
        self._wants_stop = False
        self._start_window()

    def request_stop(self) -> None:
        """Stop after the step at hand, as if time were up."""
        self._wants_stop = True

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint of the same network."""
        self._optimiser.unpack_state(checkpoint.tensors)
        self.num_done = checkpoint.num_done
        self._train_s = checkpoint.train_s

    def run(self) -> Measurement | None:
        """Train to the end of the schedule or of the time; return the last evaluation."""
        started_s = last_s = saved_s = evaluated_s = self._clock()
        measured = self.evaluate() if not self.num_done else None
        while self.num_done < self._settings.steps and not self._wants_stop:
            self._take_step()
            now = self._clock()
            self._train_s, last_s = self._train_s + now - last_s, now
            if self.num_done % _REPORT_STEPS == 0:
                self._report_window()
            if self._is_due(now - saved_s, self._settings.checkpoint_minutes):
                self.save()
                saved_s = now
            if self._is_due(now - evaluated_s, self._settings.evaluate_minutes):
                self.evaluate()
                evaluated_s = now
            if self._is_due(now - started_s, self._settings.max_minutes):
                self._wants_stop = True
            self._agree_on_stop()
        self.save()
        measured = self.evaluate() or measured
        self.export(measured)
        return measured

    def evaluate(self) -> Measurement | None:
        """Measure held-out answers with the averaged weights; None where none are held out."""
        places = self._dataset.heldout[: self._settings.heldout_sequences]
        if not places or not self._processes.is_main:
            return None
        meter = Meter(self._settings.block_size, self._device)
        terms = compute_loss_weights(self.num_done, self._settings)
        with torch.no_grad(), self._optimiser.averaged():
            for number, place in enumerate(places):
                sequences = [self._dataset.read(place)]
                batch = self._build_batch(sequences, [number], self._settings.block_size)
                meter.add(self._objective.compute(batch, terms))
        measured = meter.measure()
        self._send_report("heldout", measured, 0.0)
        return measured

    def save(self) -> None:
        """Write a checkpoint."""
        if not self._processes.is_main:
            return
        tensors = self._optimiser.pack_state() | {"d2t": self._network.d2t}
        write_checkpoint(
            self._output / CHECKPOINTS,
            Checkpoint(
                num_done=self.num_done,
                train_s=self._train_s,
                config=self._network.config,
                settings=asdict(self._settings),
                tensors=tensors,
            ),
        )

    def export(self, measured: Measurement | None) -> None:
        """Write the drafter with the averaged weights, as `serve` and others load it."""
        if not self._processes.is_main:
            return
        facts = {
            "steps": self.num_done,
            "train_s": round(self._train_s),
            "settings": asdict(self._settings),
            "heldout": None if measured is None else measured.to_dict(),
        }
        with self._optimiser.averaged():
            save_checkpoint(self._output, self._network, extra={"forerun_training": facts})

    def _take_step(self) -> None:
        settings, optimiser = self._settings, self._optimiser
        batch = self._draw_batch()
        optimiser.zero_gradient()
        terms = compute_loss_weights(self.num_done, settings)
        loss = self._objective.compute(batch, terms, self._processes)
        loss.total.backward()  # type: ignore[no-untyped-call]
        self._processes.add_up(optimiser.gradient)
        total = self._processes.add_up(loss.total.detach().clone())
        norm = optimiser.measure_gradient()
        self._check_finite(float(total), norm)
        rate = compute_learning_rate(self.num_done, settings)
        optimiser.step(self.num_done, rate, norm)
        self.num_done += 1
        self._window.add(replace(loss, total=total))
        self._window_tokens += batch.num_tokens

    def _draw_batch(self) -> TrainBatch:
        """Return this process's batch of this step."""
        count, processes = self._settings.sequences_per_step, self._processes
        first = (self.num_done * processes.size + processes.rank) * count
        # A sequence's anchors depend on its place in the order, not on which process has it.
        seeds = [self._settings.seed * _SEED_STRIDE + first + i for i in range(count)]
        return self._build_batch(self._dataset.draw(first, count), seeds, self._draw_block_size())

    def _draw_block_size(self) -> int:
        """Return the length of this step's blocks, the same in all processes.

        Slots see each other, so a drafter is only good at the lengths it was trained on.
        """
        chooser = random.Random(f"{self._settings.seed}:{self.num_done}")
        return chooser.randint(self._settings.shortest_block, self._settings.block_size)

    def _build_batch(
        self, sequences: list[TargetSequence], seeds: list[int], block_size: int
    ) -> TrainBatch:
        settings = self._settings
        return build_batch(
            sequences,
            seeds,
            anchors_per_sequence=settings.anchors_per_sequence * settings.block_size // block_size,
            block_size=block_size,
            device=self._device,
        )

    def _check_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        last = find_checkpoint(self._output / CHECKPOINTS)
        kept = "there is no checkpoint yet" if last is None else f"{last} is the last good one"
        raise ConfigError(
            f"step {self.num_done + 1}: the loss is {loss}, its gradient {norm}; training stopped, "
            f"{kept}. Give a lower --learning-rate and run again."
        )

    def _is_due(self, passed_s: float, minutes: float | None) -> bool:
        return minutes is not None and passed_s >= 60 * minutes

    def _agree_on_stop(self) -> None:
        """Stop all processes where one wants to, or the others would wait for it."""
        if self._processes.size > 1:
            wish = torch.tensor(float(self._wants_stop), device=self._device)
            self._wants_stop = bool(self._processes.add_up(wish) > 0)

    def _start_window(self) -> None:
        self._window = Meter(self._settings.block_size, self._device)
        self._window_tokens = 0
        self._window_start_s = self._train_s

    def _report_window(self) -> None:
        seconds = max(self._train_s - self._window_start_s, 1e-9)
        self._send_report("train", self._window.measure(), self._window_tokens / seconds)
        self._start_window()

    def _send_report(self, kind: str, measured: Measurement, tokens_per_s: float) -> None:
        if not self._processes.is_main:
            return
        per_step_s = self._train_s / max(1, self.num_done)
        self._report(
            TrainReport(
                kind=kind,
                num_done=self.num_done,
                num_steps=self._settings.steps,
                measured=measured,
                learning_rate=compute_learning_rate(self.num_done, self._settings),
                tokens_per_s=tokens_per_s,
                train_s=self._train_s,
                left_s=per_step_s * (self._settings.steps - self.num_done),
            )
        )
