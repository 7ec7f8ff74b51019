"""What changes with the step: the learning rate and the weights of the loss's terms."""

from __future__ import annotations

import math

from forerun.training.objective.loss import LossWeights
from forerun.training.settings import TrainSettings


def compute_learning_rate(step: int, settings: TrainSettings) -> float:
    """Return the rate of a step: a linear rise, then a cosine down to a floor."""
    warmup = max(1, round(settings.warmup_frac * settings.steps))
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, settings.steps - warmup))
    floor = settings.final_rate_frac
    return settings.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2)


def compute_loss_weights(step: int, settings: TrainSettings) -> LossWeights:
    """Return the terms' weights of a step.

    The gradient of L1 is proportional to q, which starts flat, so soft cross-entropy goes first;
    L1, which is the rejection rate itself, takes over later.
    """
    progress = step / settings.steps - settings.tv_from
    share = min(1.0, max(0.0, progress / settings.tv_ramp if settings.tv_ramp else progress >= 0))
    return LossWeights(
        hard=settings.hard_weight,
        soft=(1 - share) * settings.soft_weight,
        l1=share * settings.l1_weight,
        confidence=settings.confidence_weight,
    )
