"""What training needs of a target beside its answers: where to tap it, its head.

Shapes: V vocabulary, d hidden_size, A rows.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ConfigError
from forerun.models.loader import load_model
from forerun.training.objective.products import multiply_chosen, multiply_shifted, widen

DEFAULT_NUM_TAPS = 5
_LSE_ROWS = 512


def spread_taps(num_layers: int, num_taps: int = DEFAULT_NUM_TAPS) -> tuple[int, ...]:
    """Return layers to tap, evenly from the second to the third last (DFlash's rule)."""
    first, last = 1, num_layers - 3
    if last < first or num_taps < 1:
        raise ConfigError(
            f"a target of {num_layers} layers cannot be tapped {num_taps} times between layers 1 "
            f"and {last}; choose layers with --target-layer-ids."
        )
    gaps = max(1, num_taps - 1)
    spread = [first + (last - first) * i / gaps for i in range(num_taps)]
    return tuple(sorted({int(layer + 0.5) for layer in spread}))


def check_taps(target_layer_ids: tuple[int, ...], num_layers: int) -> None:
    """Raise ConfigError for layers that a target of so many layers does not have."""
    wrong = [layer for layer in target_layer_ids if not -1 <= layer <= num_layers - 2]
    ascending = sorted(set(target_layer_ids)) == list(target_layer_ids)
    if wrong or not ascending or not target_layer_ids:
        raise ConfigError(
            f"--target-layer-ids {list(target_layer_ids)} must be ascending layers of -1 "
            f"(embeddings) to {num_layers - 2} of this target."
        )


def load_head(path: Path) -> Tensor:
    """Return the bfloat16 head [V, d] of a model folder or GGUF file; raises ConfigError."""
    model = load_model(path, dtype=torch.bfloat16, pack=False)
    return model.head.table.plain_weight.data.clone()


def compute_lse(hidden: Tensor, head: Tensor, token_ids: Tensor) -> Tensor:
    """Return logsumexp of the logits of final-normed rows [A, d], float32 [A].

    Computed as training computes the target's probabilities from the same rows, so that these sum
    to 1 there. `token_ids` [A] are likely tokens of the rows.
    """
    widened = widen(head)
    # NOTE: results are written into memory that is there before: small tensors that outlive large
    # temporary ones of changing sizes would split what these leave, and memory would grow.
    lse = torch.empty(len(hidden))
    for begin in range(0, len(hidden), _LSE_ROWS):
        part = slice(begin, begin + _LSE_ROWS)
        rows = hidden[part].to(head.dtype)
        shift = multiply_chosen(rows, head, token_ids[part])
        lse[part] = shift + multiply_shifted(rows, widened, shift).float().logsumexp(dim=-1)
    return lse
