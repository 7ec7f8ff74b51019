"""All configuration: frozen dataclasses, one owner per option, composed, validated once.

The command line is generated from these fields: metadata `help` is the help text, and the flag is
the field name with dashes. `None` means "auto"; `resolve()` in engine/resolve.py fills it in and
logs the choice with its reason. No torch here, so the API process can read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from forerun.errors import ConfigError, describe_unknown_key
from forerun.options import check_choice, check_positive, check_type, option
from forerun.shipped_drafters import find_shipped_drafter
from forerun.speculative_config import DEFAULT_SPECULATION, SpeculativeConfig

DTYPES = ("auto", "bfloat16", "float32")
QUANTIZATIONS = ("auto", "int8", "exact", "q8_0")
ATTENTION_BACKENDS = ("auto", "native", "torch_ref")
KV_CACHE_DTYPES = ("auto", "int8")
DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which weights to serve and how to hold them."""

    model: str = option(
        DEFAULT_MODEL, "Hugging Face folder, GGUF file, or the name of a bundled model"
    )
    dtype: str = option("auto", "weight type: auto, bfloat16 or float32")
    quantization: str = option(
        "auto",
        "linear layers: auto, int8 (quantised weights as they are, 8-bit activations), exact "
        "(dequantised) or q8_0 (int8, and float weights become Q8_0)",
    )
    device: str = option("auto", "torch device, such as cpu or cuda:0")
    max_model_len: int | None = option(None, "longest prompt + output, in tokens")
    num_threads: int | None = option(None, "CPU threads for tensor work")
    attention_backend: str = option(
        "auto", "attention: auto, native (CPU kernels) or torch_ref (any device)"
    )
    batch_invariant: bool = option(
        False, "give a request the same bits at any load, even where that is slower"
    )

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, DTYPES)
        check_choice("quantization", self.quantization, QUANTIZATIONS)
        check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        check_positive("max_model_len", self.max_model_len)
        check_positive("num_threads", self.num_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV pool; its size is fixed at start."""

    kv_cache_memory: str | None = option(None, "size of the KV pool, such as 512M or 2G")
    kv_cache_dtype: str = option(
        "auto", "type of the KV pool: auto (the model's) or int8 (half the bytes of bfloat16)"
    )
    kv_block_size: int = option(16, "tokens per KV block")
    enable_prefix_caching: bool = option(True, "reuse the K/V of shared prefixes")

    def __post_init__(self) -> None:
        check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        check_positive("kv_block_size", self.kv_block_size)
        if self.kv_cache_memory is not None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """How much may run at once and how much may wait."""

    max_num_seqs: int = option(256, "requests running at once")
    max_num_batched_tokens: int | None = option(None, "rows per step, all requests together")
    max_prefill_while_decoding: int | None = option(
        None, "prompt rows per step while other requests decode"
    )
    max_waiting_requests: int = option(1024, "requests that may queue before a 503")

    def __post_init__(self) -> None:
        check_positive("max_num_seqs", self.max_num_seqs)
        check_positive("max_num_batched_tokens", self.max_num_batched_tokens)
        check_positive("max_prefill_while_decoding", self.max_prefill_while_decoding)
        check_positive("max_waiting_requests", self.max_waiting_requests)
        rows = self.max_num_batched_tokens
        if rows is not None and rows < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({rows}) must be at least --max-num-seqs "
                f"({self.max_num_seqs}): every running request needs one row per step."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything an engine needs to start."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = DEFAULT_SPECULATION

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Build from flat option names, as the offline `LLM` takes them; raises ConfigError.

        `speculative_config` may be a SpeculativeConfig, a mapping or a JSON string. Without one
        it is adaptive: DSpark for a model whose drafter ships, n-gram for any other.
        """
        parts = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owners = {f.name: part for part, kind in parts.items() for f in fields(kind)}
        speculative = _parse_speculative(options.pop("speculative_config", None))
        if speculative is None:
            speculative = choose_speculation(str(options.get("model", DEFAULT_MODEL)))
        grouped: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for name, value in options.items():
            if name not in owners:
                allowed = [*owners, "speculative_config"]
                raise ConfigError(describe_unknown_key(name, allowed, kind="option"))
            check_type(name, value, get_type_hints(parts[owners[name]])[name])
            grouped[owners[name]][name] = value
        built = {part: kind(**grouped[part]) for part, kind in parts.items()}
        return cls(speculative=speculative, **built)


def choose_speculation(model: str) -> SpeculativeConfig:
    """Return what runs for a model when nothing is said about speculation."""
    drafter = find_shipped_drafter(model)
    if drafter is None:
        return DEFAULT_SPECULATION
    return replace(
        DEFAULT_SPECULATION,
        method="dspark",
        model=drafter.name,
        num_speculative_tokens=drafter.num_speculative_tokens,
        prompt_lookup=True,
    )


def _parse_speculative(given: object) -> SpeculativeConfig | None:
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    if isinstance(given, str):
        return SpeculativeConfig.from_json(given)
    if isinstance(given, Mapping):
        return SpeculativeConfig.from_dict(given)
    raise ConfigError(f"speculative_config must be a mapping or a JSON object, got {given!r}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """The HTTP side."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    api_key: str | None = option(None, "require this bearer token")
    served_model_name: str | None = option(None, "model name clients use")
    drain_timeout_s: float = option(30.0, "seconds to finish running requests on SIGTERM")

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
