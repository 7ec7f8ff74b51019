"""What one benchmark run does: `BenchConfig`, from whose fields the command line is generated.

Names follow `vllm bench serve` where the meaning is the same. `None` means "not sent" for sampling
fields (the server's own defaults apply) and "not limited" for the load.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import ConfigError, describe_unknown_key

BACKENDS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("small", "evaluation", "custom", "random")
LATENCIES = ("ttft", "tpot", "itl", "e2el")


def _option(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchConfig:
    """One load on one server; raises ConfigError naming the option at fault."""

    base_url: str = _option("http://127.0.0.1:8000", "server to measure")
    model: str | None = _option(None, "model name to ask for (default: the first one served)")
    api_key: str | None = _option(None, "bearer token")
    backend: str | None = _option(
        None, "openai (completions) or openai-chat (default: what the data set's rows need)"
    )
    dataset_name: str = _option("small", "small, evaluation, custom or random")
    dataset_path: str | None = _option(None, "JSON-lines file of the custom data set")
    num_prompts: int | None = _option(None, "requests to send (default: every row once)")
    oversample: bool = _option(True, "repeat rows when the data set is smaller than asked for")
    disable_shuffle: bool = _option(False, "keep the data set's order")
    random_input_len: int = _option(1024, "prompt tokens of the random data set")
    random_output_len: int = _option(128, "output tokens of the random data set")
    custom_output_len: int | None = _option(None, "max_tokens of every request, over the row's own")
    max_concurrency: int | None = _option(None, "most requests in flight (closed loop)")
    request_rate: float = _option(math.inf, "requests per second, Poisson arrivals (open loop)")
    num_warmups: int = _option(0, "requests sent before the run, at its concurrency, not measured")
    reset_prefix_cache: bool = _option(False, "POST /reset_prefix_cache before the run")
    seed: int = _option(0, "seed of the order, of random prompts and of arrivals")
    send_seeds: bool = _option(False, "send seed + row number with each request")
    ignore_eos: bool = _option(False, "force outputs to max_tokens; marks the run as synthetic")
    temperature: float | None = _option(None, "sampling temperature")
    top_p: float | None = _option(None, "nucleus sampling")
    top_k: int | None = _option(None, "top-k sampling")
    extra_body: str | None = _option(None, "JSON object merged into every request")
    request_timeout_s: float = _option(3600.0, "seconds after which a request counts as failed")
    percentile_metrics: str = _option(
        "ttft,tpot,itl,e2el", "latencies to report: ttft, tpot, itl, e2el"
    )
    metric_percentiles: str = _option("50,90,99", "percentiles of the latencies")
    label: str | None = _option(None, "name of the run in result files")
    save_result: bool = _option(False, "write the result, and one row per request beside it")
    save_detailed: bool = _option(False, "put vLLM's per-request lists into the result")
    result_dir: str = _option(".", "folder of the result files")
    result_filename: str | None = _option(None, "file name of the result")

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--base-url must start with http:// or https://, got {self.base_url!r}."
            )
        if self.backend is not None and self.backend not in BACKENDS:
            raise ConfigError(describe_unknown_key(self.backend, BACKENDS, kind="backend"))
        if self.dataset_name not in DATASETS:
            raise ConfigError(describe_unknown_key(self.dataset_name, DATASETS, kind="data set"))
        if (self.dataset_name == "custom") != (self.dataset_path is not None):
            raise ConfigError(
                "--dataset-path belongs to --dataset-name custom; give both or neither."
            )
        self._check_numbers()
        self.parse_latencies()
        self.parse_percentiles()
        self.parse_extra_body()

    def _check_numbers(self) -> None:
        names = ("num_prompts", "max_concurrency", "random_input_len", "random_output_len")
        for name in (*names, "custom_output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {value}.")
        for name in ("request_rate", "request_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{_flag(name)} must be above 0, got {getattr(self, name)}.")
        if self.num_warmups < 0:
            raise ConfigError(f"--num-warmups must be at least 0, got {self.num_warmups}.")

    @property
    def is_closed_loop(self) -> bool:
        """Whether a new request waits for an old one and for nothing else."""
        return math.isinf(self.request_rate)

    def parse_latencies(self) -> tuple[str, ...]:
        """Return the latencies to report; raises ConfigError."""
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        for name in names:
            if name not in LATENCIES:
                raise ConfigError(describe_unknown_key(name, LATENCIES, kind="percentile metric"))
        return names

    def parse_percentiles(self) -> tuple[float, ...]:
        """Return the percentiles to report; raises ConfigError."""
        try:
            values = tuple(float(text) for text in self.metric_percentiles.split(","))
        except ValueError:
            values = ()
        if not values or not all(0 <= value <= 100 for value in values):
            raise ConfigError(
                "--metric-percentiles must be numbers in 0..100 with commas, such as 50,99; got "
                f"{self.metric_percentiles!r}."
            )
        return values

    def parse_extra_body(self) -> dict[str, Any]:
        """Return the fields every request carries; raises ConfigError."""
        if self.extra_body is None:
            return {}
        try:
            value = json.loads(self.extra_body)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--extra-body is not valid JSON: {error}.") from error
        if not isinstance(value, dict):
            raise ConfigError('--extra-body must be a JSON object such as {"min_p": 0.1}.')
        return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
