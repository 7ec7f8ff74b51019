"""All configuration: frozen dataclasses, one owner per option, composed, validated once.

The command line is generated from these fields: metadata `help` is the help text, and the flag is
the field name with dashes. `None` means "auto"; `resolve()` in engine/resolve.py fills it in and
logs the choice with its reason. No torch here, so the API process can read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from forerun.errors import ConfigError, describe_unknown_key

DRAFTER_METHODS = ("none", "ngram", "draft_model", "synthetic")
REJECTION_METHODS = ("standard", "coupled", "synthetic")
DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
MAX_SPECULATIVE_TOKENS = 32
DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("auto", "int8", "exact", "q8_0")
ATTENTION_BACKENDS = ("auto", "native", "torch_ref")
KV_CACHE_DTYPES = ("auto", "int8")
DEFAULT_MODEL = "smollm2-135m-instruct"


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which weights to serve and how to hold them."""

    model: str = _option(
        DEFAULT_MODEL, "Hugging Face folder, GGUF file, or the name of a bundled model"
    )
    dtype: str = _option("auto", "weight type: auto, bfloat16 or float32")
    quantization: str = _option(
        "auto",
        "linear layers: auto, int8 (quantised weights as they are, 8-bit activations), exact "
        "(dequantised) or q8_0 (int8, and float weights become Q8_0)",
    )
    device: str = _option("auto", "torch device, such as cpu or cuda:0")
    max_model_len: int | None = _option(None, "longest prompt + output, in tokens")
    num_threads: int | None = _option(None, "CPU threads for tensor work")
    attention_backend: str = _option(
        "auto", "attention: auto, native (CPU kernels) or torch_ref (any device)"
    )
    batch_invariant: bool = _option(
        False, "give a request the same bits at any load, even where that is slower"
    )

    def __post_init__(self) -> None:
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("quantization", self.quantization, QUANTIZATIONS)
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        _check_positive("max_model_len", self.max_model_len)
        _check_positive("num_threads", self.num_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV pool; its size is fixed at start."""

    kv_cache_memory: str | None = _option(None, "size of the KV pool, such as 512M or 2G")
    kv_cache_dtype: str = _option(
        "auto", "type of the KV pool: auto (the model's) or int8 (half the bytes of bfloat16)"
    )
    kv_block_size: int = _option(16, "tokens per KV block")
    enable_prefix_caching: bool = _option(True, "reuse the K/V of shared prefixes")

    def __post_init__(self) -> None:
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_positive("kv_block_size", self.kv_block_size)
        if self.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How much may run at once and how much may wait."""

    max_num_seqs: int = _option(256, "requests running at once")
    max_num_batched_tokens: int | None = _option(None, "rows per step, all requests together")
    max_prefill_while_decoding: int | None = _option(
        None, "prompt rows per step while other requests decode"
    )
    max_waiting_requests: int = _option(1024, "requests that may queue before a 503")

    def __post_init__(self) -> None:
        _check_positive("max_num_seqs", self.max_num_seqs)
        _check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        _check_positive("max_prefill_while_decoding", self.max_prefill_while_decoding)
        _check_positive("max_waiting_requests", self.max_waiting_requests)
        rows = self.max_num_batched_tokens
        if rows is not None and rows < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({rows}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): every running request needs one row per step."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """Drafter, its depth, the verifier and the budget policy. Keys are spelled as in vLLM.

    The policy is `adaptive` if switched on, `schedule` or `threshold` if their key is given, else
    `fixed`. `synthetic_acceptance_rates[j]` is the chance that drafts 0..j are all accepted.
    """

    method: str = _option("ngram", "drafter: none, ngram, draft_model or synthetic")
    model: str = _option("", "draft model: folder, GGUF file or bundled name (draft_model only)")
    num_speculative_tokens: int = _option(5, "most draft tokens per request per step (k)")
    prompt_lookup_max: int = _option(4, "longest n-gram the ngram drafter looks up")
    prompt_lookup_min: int = _option(2, "shortest n-gram the ngram drafter looks up")
    draft_sample_method: str = _option(
        "probabilistic", "drafts of sampled requests: greedy or probabilistic"
    )
    rejection_sample_method: str = _option(
        "standard", "verifier of unseeded sampled requests: standard, coupled or synthetic (lossy)"
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = _option(
        None, "chance that drafts up to each position are accepted (synthetic only)"
    )
    synthetic_acceptance_length: float | None = _option(
        None, "mean tokens per verification, in place of the rates (synthetic only)"
    )
    enable_adaptive_verification: bool = _option(
        False, "verify, each step, the drafts that are worth their time"
    )
    adaptive_min_gain: float = _option(0.01, "gain from trimming below which nothing is trimmed")
    cost_profile: str = _option("", "file of step costs to use in place of measuring them")
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = _option(
        None, "draft tokens by running requests, as [first, last, k] ranges"
    )
    confidence_threshold: float | None = _option(
        None, "verify drafts up to the first one with a lower confidence"
    )

    def __post_init__(self) -> None:
        _check_choice("method", self.method, DRAFTER_METHODS)
        _check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_METHODS)
        _check_choice("draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
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
        _check_frac("adaptive_min_gain", self.adaptive_min_gain)
        if (self.method == "draft_model") != bool(self.model):
            raise ConfigError(
                "method 'draft_model' and a draft model in 'model' go together, got method "
                f"{self.method!r} and model {self.model!r}."
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
        if self.cost_profile and not self.enable_adaptive_verification:
            raise ConfigError('cost_profile needs "enable_adaptive_verification": true.')
        if self.confidence_threshold is not None:
            _check_frac("confidence_threshold", self.confidence_threshold)
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
                _check_type(label, given, hints[key])
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


def _check_frac(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{name} must be in 0..1, got {value}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat option names, as the offline `LLM` takes them; raises ConfigError.

        `speculative_config` may be a SpeculativeConfig, a mapping or a JSON string.
        """
        parts = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owners = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        speculative = _parse_speculative(options.pop("speculative_config", None))
        grouped: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for name, value in options.items():
            if name not in owners:
                allowed = [*owners, "speculative_config"]
                raise ConfigError(describe_unknown_key(name, allowed, kind="option"))
            _check_type(name, value, get_type_hints(parts[owners[name]])[name])
            grouped[owners[name]][name] = value
        built = {part: kind(**grouped[part]) for part, kind in parts.items()}
        return cls(speculative=speculative, **built)


def _check_type(name: str, value: object, allowed: Any) -> None:
    """Raise ConfigError unless `value` is what the option's annotation says; bools are no ints."""
    kinds = get_args(allowed) or (allowed,)
    if type(value) not in kinds and not (type(value) is int and float in kinds):
        names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ConfigError(f"{name} must be {names}, got {value!r}.")


def _parse_speculative(given: object) -> SpeculativeConfig:
    if given is None:
        return SpeculativeConfig()
    if isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        return SpeculativeConfig.from_json(given)
    if isinstance(given, Mapping):
        return SpeculativeConfig.from_dict(given)
    raise ConfigError(f"speculative_config must be a mapping or a JSON object, got {given!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = _option("127.0.0.1", "address to listen on")
    port: int = _option(8000, "port to listen on")
    api_key: str | None = _option(None, "require this bearer token")
    served_model_name: str | None = _option(None, "model name clients use")
    drain_timeout_s: float = _option(30.0, "seconds to finish running requests on SIGTERM")

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in 0..65535, got {self.port}.")
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("--api-key is empty; give a key, or leave the option out.")
        if self.drain_timeout_s < 0:
            raise ConfigError(f"--drain-timeout-s must be >= 0, got {self.drain_timeout_s}.")


def parse_bytes(name: str, text: str) -> int:
    """Return the number of bytes in a size such as 512M, 2G or 1073741824."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    cleaned = text.strip().upper().removesuffix("B").removesuffix("I")
    scale = units.get(cleaned[-1:], 1)
    number = cleaned[:-1] if scale != 1 else cleaned
    try:
        size = int(float(number) * scale)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        raise ConfigError(f"{name} must be a size such as 512M or 2G, got {text!r}.")
    return size


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}.")


def _check_positive(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}.")
