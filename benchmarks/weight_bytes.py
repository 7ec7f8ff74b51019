"""How many bytes of weights a decoding step reads at least, as a model holds them."""

from __future__ import annotations

from forerun.models.decoder import DecoderModel
from forerun.quantisation.formats import FORMATS

_NUM_BYTES = {"float32": 4.0, "bfloat16": 2.0} | {
    name: kind.block_bytes / kind.block_size for name, kind in FORMATS.items()
}


def count_weight_bytes(model: DecoderModel) -> int:
    """Return the bytes of all linear layers and the head; of an embedding a step reads few rows."""
    linears = [linear for layer in model.layers for linear in layer.linears()]
    return round(
        sum(
            count * _NUM_BYTES[name]
            for linear in [*linears, model.head.table]
            for name, count in linear.weight_types.items()
        )
    )
