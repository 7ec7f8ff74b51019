"""What a paired comparison does: arms, loads, blocks, and in which order.

A block runs every arm once on the same prompts, seeds and arrival times; blocks are the replicates.
Arms rotate from block to block (ABC, BCA, CAB, then reversed), so that slow drift of the machine
falls on all of them alike.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.bench.options import BenchConfig
from forerun.errors import ConfigError

PROMPTS_PER_PLACE = 10
MIN_WARMUPS = 4
_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One server to compare: a command to start it, with `{port}`, or where it already runs."""

    name: str
    command: str | None = None
    base_url: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPoint:
    """One load: requests in flight, or Poisson arrivals per second."""

    max_concurrency: int | None = None
    request_rate: float = math.inf

    @property
    def name(self) -> str:
        """How it is written on the command line."""
        if self.max_concurrency is not None:
            return str(self.max_concurrency)
        return f"{self.request_rate:g}rps"


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedPlan:
    """Everything a paired comparison needs; the first arm is what the others are compared with."""

    arms: Sequence[Arm]
    loads: Sequence[LoadPoint]
    num_blocks: int
    bench: BenchConfig
    result_dir: Path
    server_ready_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(names) < 2 or len(set(names)) < len(names):
            raise ConfigError(
                f"a comparison needs at least two arms with different names, got {names}; give "
                "--arm NAME=COMMAND twice (the same command twice shows the noise)."
            )
        if self.num_blocks < 1:
            raise ConfigError(f"--blocks must be at least 1, got {self.num_blocks}.")
        if not self.server_ready_timeout_s > 0:
            raise ConfigError(
                f"--server-ready-timeout must be above 0, got {self.server_ready_timeout_s}."
            )

    def build_config(self, load: LoadPoint, block: int, base_url: str) -> BenchConfig:
        """Return the run of one cell. It depends on load and block alone, not on the arm."""
        places = load.max_concurrency
        return replace(
            self.bench,
            base_url=base_url,
            max_concurrency=load.max_concurrency,
            request_rate=load.request_rate,
            seed=self.bench.seed + block,
            num_prompts=self.bench.num_prompts or (places and PROMPTS_PER_PLACE * places),
            num_warmups=self.bench.num_warmups or places or MIN_WARMUPS,
            reset_prefix_cache=True,
        )


def parse_arm(text: str) -> Arm:
    """Return the arm of `NAME=COMMAND` or `NAME=URL`; raises ConfigError."""
    name, mark, value = text.partition("=")
    value = value.strip()
    if not mark or not _NAME.fullmatch(name) or not value:
        raise ConfigError(
            f"--arm {text!r} is not NAME=COMMAND or NAME=URL, such as "
            "none='forerun serve --port {port}'."
        )
    if value.startswith(("http://", "https://")):
        return Arm(name=name, base_url=value)
    if "{port}" not in value:
        raise ConfigError(f"the command of arm {name!r} must contain {{port}}, got {value!r}.")
    return Arm(name=name, command=value)


def parse_loads(text: str) -> list[LoadPoint]:
    """Return loads such as `1,4,16` (requests in flight) or `2.5rps`; raises ConfigError."""
    return [_parse_load(part.strip()) for part in text.split(",")]


def _parse_load(text: str) -> LoadPoint:
    try:
        if text.endswith("rps"):
            rate = float(text.removesuffix("rps"))
            load = LoadPoint(request_rate=rate)
            is_valid = 0 < rate < math.inf
        else:
            load = LoadPoint(max_concurrency=int(text))
            is_valid = int(text) > 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ConfigError(
            f"--loads holds {text!r}; a load is a number of requests in flight such as 4, or an "
            "arrival rate such as 2.5rps."
        )
    return load


def order_arms(arms: Sequence[Arm], block: int) -> list[Arm]:
    """Return the order of a block: rotated by one each time, reversed in every second cycle."""
    cycle, shift = divmod(block, len(arms))
    order = [*arms[shift:], *arms[:shift]]
    return order[::-1] if cycle % 2 else order


def order_loads(loads: Sequence[LoadPoint], seed: int, block: int) -> list[LoadPoint]:
    """Return the loads of a block in an order that is random, yet the same for every arm."""
    order = list(loads)
    random.Random(f"{seed}/{block}").shuffle(order)
    return order
