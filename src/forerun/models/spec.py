"""ModelSpec: what a decoder is made of, read from config.json or GGUF metadata. No torch.

Families turn their own configuration into this one description (spec_from_hf, spec_from_gguf), and
everything else reads only this. `Fields` gives checked access to a configuration: every mistake is
a ConfigError that names the key and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.cache.kv_store import KVLayerShape

# Stored types that are not quantised, by ggml's names.
FLOAT_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary frequencies theta^(-2i/D) / factor_i; no factors means all 1."""

    theta: float
    freq_factors: tuple[float, ...] | None = None  # [head_dim / 2]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer. `window` None means full attention."""

    window: int | None
    rope: RopeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A decoder-only model, independent of the format it was stored in.

    `architecture` is the Hugging Face name. `max_model_len` is the trained context. `quantization`
    names the type most layer weights of a GGUF file are stored in, floats included (F16, Q4_1); how
    they are computed is the engine's choice. Rows of a model that is not `causal` see those after
    their own too: the block of a parallel drafter.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    attention_scale: float
    layers: tuple[LayerSpec, ...]
    tie_word_embeddings: bool
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embed_scale: float | None = None
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: str | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model has {self.num_heads} query heads and {self.num_kv_heads} KV heads; the "
                "first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise ConfigError(f"the model's head_dim is {self.head_dim}; it must be even.")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def build_kv_layers(self) -> tuple[KVLayerShape, ...]:
        """Return the K/V geometry of every layer, as the pool wants it."""
        from forerun.cache.kv_store import KVLayerShape  # imports torch

        shape = KVLayerShape(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        return (shape,) * self.num_layers


class Fields:
    """Checked access to a configuration mapping; `source` names it in messages."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive finite number; without a default the key is required."""
        value = self._get(key, default)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        if not valid or not math.isfinite(value) or value <= 0:
            raise self.error(key, value, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return a positive number, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default the key is required."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, value, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return token ids given as one integer, a list of them, or not at all."""
        value = self.values.get(key)
        given = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in given):
            raise self.error(key, value, "a token id or a list of them")
        return tuple(dict.fromkeys(given))

    def mapping(self, key: str) -> Fields | None:
        """Return a nested mapping, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, value, "an object")
        return Fields(value, f"{self.source} {key}")

    def error(self, key: str, value: object, allowed: str) -> ConfigError:
        """Return the error for a bad value of a key."""
        if value is None:
            return ConfigError(f"{self.source} lacks {key!r}, which must be {allowed}.")
        return ConfigError(f"{self.source} has {key} = {value!r}; it must be {allowed}.")

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        return default if value is None else value
