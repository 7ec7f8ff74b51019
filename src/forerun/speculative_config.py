"""The speculative configuration: drafter, depth, verifier, budget policy. No torch.

Keys are spelled as in vLLM's `--speculative-config`; unknown ones are errors naming the nearest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from forerun.errors import ConfigError, describe_unknown_key
from forerun.options import check_choice, check_frac, check_type, option

DRAFTER_METHODS = ("none", "ngram", "draft_model", "dspark", "dflash", "synthetic")
# Those that have weights of their own, in `model`.
MODEL_METHODS = ("draft_model", "dspark", "dflash")
REJECTION_METHODS = ("standard", "coupled", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_SPECULATIVE_TOKENS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Drafter, its depth, the verifier and the budget policy. Keys are spelled as in vLLM.

    The policy is `adaptive` if switched on, `schedule` or `threshold` if their key is given, else
    `fixed`. `synthetic_acceptance_rates[j]` is the chance that drafts 0..j are all accepted.
    """

    method: str = option("ngram", f"drafter: {', '.join(DRAFTER_METHODS)}")
    model: str = option(
        "", "the drafter's weights: folder, GGUF file or bundled name (draft_model, dspark, dflash)"
    )
    num_speculative_tokens: int = option(5, "most draft tokens per request per step (k)")
    prompt_lookup: bool = option(
        False, "take tokens from the request's own text where that is worth more than the drafter"
    )
    prompt_lookup_max: int = option(4, "longest n-gram that is looked up (ngram, prompt_lookup)")
    prompt_lookup_min: int = option(2, "shortest n-gram that is looked up (ngram, prompt_lookup)")
    draft_sample_method: str = option(
        "probabilistic", "drafts of sampled requests: greedy or probabilistic"
    )
    rejection_sample_method: str = option(
        "standard", "verifier of unseeded sampled requests: standard, coupled or synthetic (lossy)"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, "chance that drafts up to each position are accepted (synthetic only)"
    )
    synthetic_acceptance_length: float | None = option(
        None, "mean tokens per verification, in place of the rates (synthetic only)"
    )
    enable_adaptive_verification: bool = option(
        False, "verify, each step, the drafts that are worth their time"
    )
    adaptive_min_gain: float = option(0.01, "gain from trimming below which nothing is trimmed")
    cost_profile: str = option("", "file of step costs to use in place of measuring them")
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = option(
        None, "draft tokens by running requests, as [first, last, k] ranges"
    )
    confidence_threshold: float | None = option(
        None, "verify drafts up to the first one with a lower confidence"
    )

    def __post_init__(self) -> None:
        check_choice("method", self.method, DRAFTER_METHODS)
        check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_METHODS)
        check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"num_speculative_tokens must be in 1..{MAX_SPECULATIVE_TOKENS}, got "
                f"{self.num_speculative_tokens}."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be in 1..prompt_lookup_max, got "
                f"{self.prompt_lookup_min}..{self.prompt_lookup_max}."
            )
        check_frac("adaptive_min_gain", self.adaptive_min_gain)
        if (self.method in MODEL_METHODS) != bool(self.model):
            raise ConfigError(
                f"the methods {', '.join(MODEL_METHODS)} and a drafter's weights in 'model' go "
                f"together, got method {self.method!r} and model {self.model!r}."
            )
        self._check_synthetic()
        self._check_policy()

    def _check_synthetic(self) -> None:
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        is_synthetic = self.rejection_sample_method == "synthetic"
        if self.method == "synthetic" and not is_synthetic:
            raise ConfigError(
                "method 'synthetic' drafts nothing real: it needs \"rejection_sample_method\": "
                '"synthetic" with rates.'
            )
        if is_synthetic != (rates is not None or length is not None) or (
            rates is not None and length is not None
        ):
            raise ConfigError(
                "rejection_sample_method 'synthetic' and exactly one of synthetic_acceptance_rates "
                "and synthetic_acceptance_length go together."
            )
        k = self.num_speculative_tokens
        if length is not None and not 1.0 <= length <= k + 1:
            raise ConfigError(
                f"synthetic_acceptance_length must be in 1..{k + 1} (num_speculative_tokens + 1), "
                f"got {length}."
            )
        if rates is None:
            return
        falls = all(0.0 <= b <= a <= 1.0 for a, b in zip((1.0, *rates), rates, strict=False))
        if len(rates) != k or not falls:
            raise ConfigError(
                f"synthetic_acceptance_rates must be {k} numbers (num_speculative_tokens) in 0..1 "
                f"that never rise, got {list(rates)}."
            )

    def _check_policy(self) -> None:
        given = {
            "enable_adaptive_verification": self.enable_adaptive_verification,
            "num_speculative_tokens_per_batch_size": self.num_speculative_tokens_per_batch_size
            is not None,
            "confidence_threshold": self.confidence_threshold is not None,
        }
        chosen = [key for key, is_given in given.items() if is_given]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)} exclude each other; give one of them.")
        if chosen and self.method == "none":
            raise ConfigError(
                f'{chosen[0]} needs drafts, and "method" is "none"; give a drafter such as '
                "ngram, or leave it out."
            )
        if self.prompt_lookup and not (
            self.enable_adaptive_verification and self.method in MODEL_METHODS
        ):
            raise ConfigError(
                'prompt_lookup needs "enable_adaptive_verification": true, which compares what the '
                f"two are worth, and one of the methods {', '.join(MODEL_METHODS)}; for lookups "
                'alone use "method": "ngram".'
            )
        if self.cost_profile and not self.enable_adaptive_verification:
            raise ConfigError('cost_profile needs "enable_adaptive_verification": true.')
        if self.confidence_threshold is not None:
            check_frac("confidence_threshold", self.confidence_threshold)
        if self.num_speculative_tokens_per_batch_size is not None:
            _check_ranges(self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens)

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens a request can have in one step; 0 without a drafter."""
        return 0 if self.method == "none" else self.num_speculative_tokens

    @property
    def policy(self) -> str:
        """Name of the budget policy these keys ask for."""
        if self.method == "none":
            return "none"
        if self.enable_adaptive_verification:
            return "adaptive"
        if self.num_speculative_tokens_per_batch_size is not None:
            return "schedule"
        return "fixed" if self.confidence_threshold is None else "threshold"

    @property
    def survival_rates(self) -> tuple[float, ...] | None:
        """The synthetic rates, also where a length was given; None: acceptance is real.

        A mean length becomes the rates of least variance: certain drafts, then one by chance.
        """
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates
        accepted = self.synthetic_acceptance_length - 1.0
        k = self.num_speculative_tokens
        return tuple(min(1.0, max(0.0, accepted - position)) for position in range(k))

    @classmethod
    def from_json(cls, text: str) -> SpeculativeConfig:
        """Build from the JSON of `--speculative-config`; raises ConfigError."""
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--speculative-config is not valid JSON: {error}.") from error
        if not isinstance(value, dict):
            raise ConfigError(
                '--speculative-config must be a JSON object such as {"method": "ngram"}.'
            )
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from a mapping; unknown keys and wrong types raise ConfigError."""
        hints = get_type_hints(cls)
        options: dict[str, Any] = {}
        for key, given in value.items():
            if key not in hints:
                raise ConfigError(describe_unknown_key(key, hints, kind="speculative_config key"))
            label = f"speculative_config {key!r}"
            if key == "synthetic_acceptance_rates":
                options[key] = _read_numbers(label, given, (int, float))
            elif key == "num_speculative_tokens_per_batch_size":
                options[key] = _read_ranges(label, given)
            else:
                check_type(label, given, hints[key])
                options[key] = given
        return cls(**options)


def _read_numbers(label: str, given: object, kinds: tuple[type, ...]) -> tuple[Any, ...] | None:
    if given is None:
        return None
    if isinstance(given, (list, tuple)) and all(type(item) in kinds for item in given):
        return tuple(given)
    raise ConfigError(f"{label} must be a list of numbers, got {given!r}.")


def _read_ranges(label: str, given: object) -> tuple[tuple[int, int, int], ...] | None:
    if given is None:
        return None
    if isinstance(given, (list, tuple)):
        ranges = [_read_numbers(label, item, (int,)) for item in given]
        if ranges and all(item is not None and len(item) == 3 for item in ranges):
            return tuple(ranges)  # type: ignore[arg-type]
    raise ConfigError(
        f"{label} must be a list of [first, last, k] such as [[1, 8, 5], [9, 64, 2]], got "
        f"{given!r}."
    )


def _check_ranges(ranges: Sequence[tuple[int, int, int]], k: int) -> None:
    """Ranges of running requests must follow one another from 1 on, with 0..k drafts each."""
    expected = 1
    for first, last, drafts in ranges:
        if first != expected or last < first or not 0 <= drafts <= k:
            raise ConfigError(
                "num_speculative_tokens_per_batch_size must be ranges [first, last, k] that start "
                f"at 1 and follow one another, with k in 0..{k} (num_speculative_tokens); "
                f"[{first}, {last}, {drafts}] is not."
            )
        expected = last + 1


# What runs when nothing is said about speculation.
DEFAULT_SPECULATION = SpeculativeConfig(
    method="ngram", num_speculative_tokens=7, enable_adaptive_verification=True
)
