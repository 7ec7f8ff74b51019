"""Answers of the target to many prompts, with what it computed, written shard by shard.

Every shard is complete, so an interrupted run goes on where it stopped and loses one shard at most.
A prompt's temperature and seed follow from its id: the data is the same in any order and after any
interruption, wherever the target's bits do not depend on the batch.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.core import SamplingParams
from forerun.data.bundled import resolve_model_path
from forerun.engine.llm import LLM, Completion
from forerun.errors import ConfigError
from forerun.logs import get_logger
from forerun.models.loader import read_model_spec
from forerun.training.answers.recorder import HiddenStateRecorder
from forerun.training.answers.shards import (
    MANIFEST,
    Manifest,
    Shard,
    TargetSequence,
    find_shards,
    name_shard,
    read_manifest,
    write_manifest,
    write_shard,
)
from forerun.training.answers.target import (
    check_taps,
    compute_lse,
    load_head,
    spread_taps,
)

logger = get_logger(__name__)

Row = Mapping[str, Any]
# Shorter answers hold no block worth learning from.
MIN_ANSWER_TOKENS = 8
_SPARE_BYTES = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSettings:
    """How the target answers. `target_layer_ids` None spreads the taps over its depth."""

    model: str
    output: Path
    max_tokens: int = 256
    temperatures: tuple[float, ...] = (0.0, 0.8)
    top_p: float = 0.95
    concurrency: int = 128
    shard_prompts: int = 512
    target_layer_ids: tuple[int, ...] | None = None
    quantization: str = "auto"


@dataclass(slots=True)
class GenerationProgress:
    """What has been done so far."""

    num_prompts: int
    num_done: int = 0
    num_rows: int = 0


class Generation:
    """One run: the engine, the recorder and the folder. Raises ConfigError before it starts."""

    def __init__(
        self,
        settings: GenerationSettings,
        prompts: Sequence[Row],
        report: Callable[[GenerationProgress], None],
    ) -> None:
        self._settings = settings
        self._report = report
        path = resolve_model_path(settings.model)
        spec = read_model_spec(path)
        taps = settings.target_layer_ids
        if taps is None:
            taps = spread_taps(spec.num_layers)
        check_taps(taps, spec.num_layers)
        self._recorder = HiddenStateRecorder(taps, self._count_rows)
        self._llm = LLM(
            settings.model,
            hidden_state_sink=self._recorder,
            speculative_config={"method": "none"},
            enable_prefix_caching=False,
            max_num_seqs=settings.concurrency,
            quantization=settings.quantization,
        )
        manifest = Manifest(
            model=settings.model,
            quantization=self._llm.info["quantization"],
            target_layer_ids=taps,
            hidden_size=spec.hidden_size,
            vocab_size=spec.vocab_size,
        )
        _settle_manifest(settings.output, manifest)
        done = _read_done(settings.output)
        self._todo = [row for row in prompts if row["id"] not in done]
        self.progress = GenerationProgress(len(prompts), len(prompts) - len(self._todo))
        self.needed_bytes = self._estimate_bytes(manifest)
        self._head = load_head(path)

    def check_disk(self, limit: int | None) -> None:
        """Refuse what would not fit: the free space, or a limit given in bytes."""
        free = shutil.disk_usage(self._settings.output).free - _SPARE_BYTES
        allowed = free if limit is None else min(free, limit)
        if self.needed_bytes > allowed:
            raise ConfigError(
                f"the answers to {len(self._todo)} prompts need up to "
                f"{self.needed_bytes / 1e9:.1f} GB in {self._settings.output}, where "
                f"{allowed / 1e9:.1f} GB may be used; take fewer with --num-prompts, shorter ones "
                "with --max-tokens, or another folder."
            )

    def run(self) -> None:
        """Answer what is not answered yet."""
        count = self._settings.shard_prompts
        for begin in range(0, len(self._todo), count):
            rows = self._todo[begin : begin + count]
            sequences = self._answer(rows)
            if sequences:
                number = len(find_shards(self._settings.output))
                write_shard(name_shard(self._settings.output, number), sequences)
            self.progress.num_done += len(rows)
            self._report(self.progress)

    def _answer(self, rows: Sequence[Row]) -> list[TargetSequence]:
        room = self._llm.engine.limits.max_model_len - self._settings.max_tokens
        encoded = [self._encode(row) for row in rows]
        short = [
            (row, tokens) for row, tokens in zip(rows, encoded, strict=True) if len(tokens) <= room
        ]
        if len(short) < len(rows):
            logger.warning("%d prompts are too long and left out", len(rows) - len(short))
        params = [self._choose_params(row["id"]) for row, _ in short]
        completions = self._llm.generate([tokens for _, tokens in short], params)
        sequences = [
            self._collect(row["id"], chosen.temperature, completion)
            for (row, _), chosen, completion in zip(short, params, completions, strict=True)
        ]
        kept = [sequence for sequence in sequences if len(sequence.hidden) >= MIN_ANSWER_TOKENS]
        if kept:
            self._add_lse(kept)
        return kept

    def _add_lse(self, sequences: Sequence[TargetSequence]) -> None:
        """Fill in the normalisers of all answers in one go."""
        lengths = [len(sequence.hidden) for sequence in sequences]
        hidden = torch.cat([sequence.hidden for sequence in sequences])
        answers = torch.cat([s.token_ids[s.prompt_len :] for s in sequences])
        parts = torch.split(compute_lse(hidden, self._head, answers), lengths)
        for sequence, lse in zip(sequences, parts, strict=True):
            sequence.target_lse = lse

    def _encode(self, row: Row) -> list[int]:
        if "messages" in row:
            return self._llm.tokenizer.encode_chat(list(row["messages"]))
        return self._llm.tokenizer.encode(row["prompt"])

    def _choose_params(self, prompt_id: str) -> SamplingParams:
        seed = zlib.crc32(prompt_id.encode())
        temperatures = self._settings.temperatures
        return SamplingParams(
            temperature=temperatures[seed % len(temperatures)],
            top_p=self._settings.top_p,
            max_tokens=self._settings.max_tokens,
            seed=seed,
        )

    def _collect(
        self, prompt_id: str, temperature: float, completion: Completion
    ) -> TargetSequence:
        prompt, answer = completion.prompt_token_ids, completion.choices[0].token_ids
        token_ids = torch.tensor([*prompt, *answer])
        features, hidden = self._recorder.collect(
            f"{completion.request_id}#0", len(token_ids), len(prompt)
        )
        return TargetSequence(
            prompt_id=prompt_id,
            temperature=temperature,
            token_ids=token_ids,
            prompt_len=len(prompt),
            features=features,
            hidden=hidden,
            target_lse=torch.empty(0),
        )

    def _count_rows(self, num_rows: int) -> None:
        self.progress.num_rows += num_rows
        self._report(self.progress)

    def _estimate_bytes(self, manifest: Manifest) -> int:
        """Return the most bytes the answers can take, prompts as long as the first hundred."""
        sample = [len(self._encode(row)) for row in self._todo[:100]]
        mean = sum(sample) / max(1, len(sample))
        tokens = len(self._todo) * (mean + self._settings.max_tokens)
        return int(tokens * manifest.bytes_per_token)


def _settle_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a new folder; refuse one with data of another target."""
    if not (folder / MANIFEST).exists():
        try:
            write_manifest(folder, manifest)
        except OSError as error:
            raise ConfigError(
                f"cannot write to {folder} ({error.strerror or error}); give another --output."
            ) from error
        return
    found = read_manifest(folder)
    if found != manifest:
        raise ConfigError(
            f"{folder} holds answers of {found.model} ({found.quantization}, layers "
            f"{list(found.target_layer_ids)}), not of {manifest.model} ({manifest.quantization}, "
            f"layers {list(manifest.target_layer_ids)}); give another --output."
        )


def _read_done(folder: Path) -> set[str]:
    return {prompt_id for path in find_shards(folder) for prompt_id in Shard(path).prompt_ids}
