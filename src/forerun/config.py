"""All configuration: frozen dataclasses, one owner per option, composed, validated once.

The command line is generated from these fields: metadata `help` is the help text, and the flag is
the field name with dashes. `None` means "auto"; `resolve()` in engine/resolve.py fills it in and
logs the choice with its reason. No torch here, so the API process can read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from forerun.errors import ConfigError, describe_unknown_key

DRAFTER_METHODS = ("none", "ngram")
REJECTION_METHODS = ("standard", "coupled")
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
    """Drafter, its depth, and the verifier. Keys are spelled as in vLLM."""

    method: str = _option("ngram", "drafter: none or ngram")
    num_speculative_tokens: int = _option(5, "most draft tokens per request per step (k)")
    prompt_lookup_max: int = _option(4, "longest n-gram the ngram drafter looks up")
    prompt_lookup_min: int = _option(2, "shortest n-gram the ngram drafter looks up")
    rejection_sample_method: str = _option(
        "standard", "verifier of unseeded sampled requests: standard or coupled"
    )

    def __post_init__(self) -> None:
        _check_choice("method", self.method, DRAFTER_METHODS)
        _check_choice("rejection_sample_method", self.rejection_sample_method, REJECTION_METHODS)
        if not 1 <= self.num_speculative_tokens <= 32:
            raise ConfigError(
                f"num_speculative_tokens must be in 1..32, got {self.num_speculative_tokens}."
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ConfigError(
                "prompt_lookup_min must be in 1..prompt_lookup_max, got "
                f"{self.prompt_lookup_min}..{self.prompt_lookup_max}."
            )

    @property
    def max_draft_tokens(self) -> int:
        """Most draft tokens a request can have in one step; 0 without a drafter."""
        return 0 if self.method == "none" else self.num_speculative_tokens

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
        types = {f.name: type(f.default) for f in fields(cls)}
        for key, given in value.items():
            if key not in types:
                raise ConfigError(describe_unknown_key(key, types, kind="speculative_config key"))
            if type(given) is not types[key]:
                raise ConfigError(
                    f"speculative_config {key!r} must be {types[key].__name__}, got {given!r}."
                )
        return cls(**value)


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
