"""DSparkConfig: what a block drafter is made of, whatever dialect it was stored in. No torch.

One backbone serves DSpark (arXiv 2607.05147) and DFlash (arXiv 2602.06036), which lacks the
sequential and the confidence head. `block_size` counts the drafts of a block; `num_slots` counts
the rows the backbone computes for them, one more where the anchor's slot predicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import ConfigError

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
FLAVOURS = ("qwen3", "gemma4")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
    "vocab_size",
    "draft_vocab_size",
    "block_size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DSparkConfig:
    """Sizes and conventions of one checkpoint; raises ConfigError where they contradict each other.

    `target_layer_ids` name outputs of target layers, -1 the embeddings. `vocab_size` is the
    target's; a smaller `draft_vocab_size` means that drafts come from a part of it. Rotary
    frequencies are divided by `rope_freq_factors` [head_dim / 2], where given. `flavour` names
    whose layers the backbone has.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    has_confidence_head: bool = False
    confidence_with_markov: bool = True
    confidence_bias: bool = True
    verifier: str = ""
    rope_freq_factors: tuple[float, ...] | None = None
    flavour: str = "qwen3"
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        self._check_heads()
        self._check_vocabulary()
        _check_taps(self.target_layer_ids)
        kinds = " or ".join(MARKOV_HEAD_TYPES)
        is_known = self.markov_head_type in MARKOV_HEAD_TYPES
        _require(is_known, "markov_head_type", self.markov_head_type, kinds)
        _require(self.flavour in FLAVOURS, "flavour", self.flavour, " or ".join(FLAVOURS))
        _require(self.markov_rank >= 0, "markov_rank", self.markov_rank, "0 (no head) or more")
        if self.reads_markov_in_confidence and not self.markov_rank:
            raise ConfigError(
                "the drafter's confidence head reads the Markov embedding, but markov_rank is 0; "
                "set confidence_head_with_markov to false or give a rank."
            )

    @property
    def method(self) -> str:
        """Name of the drafting method: dflash is the backbone alone."""
        return "dspark" if self.markov_rank or self.has_confidence_head else "dflash"

    @property
    def num_slots(self) -> int:
        """Rows of a full block, the anchor's among them."""
        return self.count_slots(self.block_size)

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether drafts come from a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def reads_markov_in_confidence(self) -> bool:
        """Whether the confidence head sees the embedding of the previous token."""
        return self.has_confidence_head and self.confidence_with_markov

    @property
    def confidence_size(self) -> int:
        """Inputs of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.reads_markov_in_confidence else 0)

    @property
    def embed_scale(self) -> float:
        """Factor of the block's embeddings."""
        return self.hidden_size**0.5 if self.flavour == "gemma4" else 1.0

    @property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        return 1.0 if self.flavour == "gemma4" else self.head_dim**-0.5

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the projected keys, normed without a weight and not rotated."""
        return self.flavour == "gemma4"

    @property
    def activation(self) -> str:
        """Activation of the MLP, by our name."""
        return "gelu_tanh" if self.flavour == "gemma4" else "silu"

    def count_slots(self, num_drafts: int) -> int:
        """Return the rows of a block that gives `num_drafts` drafts."""
        return num_drafts if self.sample_from_anchor else num_drafts + 1

    def _check_heads(self) -> None:
        divides = self.num_heads % self.num_kv_heads == 0
        allowed = f"a divisor of num_heads ({self.num_heads})"
        _require(divides, "num_kv_heads", self.num_kv_heads, allowed)
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        factors = self.rope_freq_factors
        fits = factors is None or len(factors) == self.head_dim // 2
        _require(fits, "rope_freq_factors", factors, f"{self.head_dim // 2} numbers")

    def _check_vocabulary(self) -> None:
        vocab, draft, mask = self.vocab_size, self.draft_vocab_size, self.mask_token_id
        _require(draft <= vocab, "draft_vocab_size", draft, f"at most vocab_size ({vocab})")
        _require(0 <= mask < vocab, "mask_token_id", mask, f"an id below vocab_size ({vocab})")


def _check_taps(layer_ids: tuple[int, ...]) -> None:
    rises = all(a < b for a, b in zip(layer_ids, layer_ids[1:], strict=False))
    valid = bool(layer_ids) and layer_ids[0] >= -1 and rises
    _require(valid, "target_layer_ids", layer_ids, "strictly increasing layers from -1 on")


def _require(condition: bool, name: str, given: object, allowed: str) -> None:
    if not condition:
        raise ConfigError(f"the drafter's {name} is {given!r}; it must be {allowed}.")
