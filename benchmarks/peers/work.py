"""Prompts of a model's rows, and the speed of the machine's memory."""

from __future__ import annotations

import time

from benchmarks.peers.adapters.base import Work
from benchmarks.peers.rows import Row, cut_prompts
from benchmarks.peers.weights import ModelFiles

from forerun.bench.options import BenchConfig
from forerun.bench.workload import build_workload
from forerun.data import build_prompt_set
from forerun.tokenization import load_tokenizer

_DATASET = "evaluation"
_MAX_WARMUPS = 4
# Far larger than any cache, so that it is read from memory.
_READ_NUMBERS = 2**28
_READS = 8


class WorkBuilder:
    """Builds the work of a row in a block; every peer of the block gets the same."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = load_tokenizer(files.folder)
        stories = [
            source["messages"][0]["content"]
            for source in build_prompt_set(_DATASET)
            if source["category"] == "summarise"
        ]
        self._text_ids = self._tokenizer.encode("\n\n".join(stories))

    def build(self, row: Row, block: int) -> Work:
        """Return the prompts of a row, other ones in every block."""
        bench = BenchConfig(
            dataset_name=_DATASET,
            num_prompts=row.num_prompts,
            custom_output_len=row.max_tokens,
            max_concurrency=row.num_streams,
            num_warmups=min(_MAX_WARMUPS, row.num_streams),
            temperature=0.0,
            seed=block,
        )
        if row.is_served:
            rows = build_workload(bench)
            prompts = [self._tokenizer.encode_chat(source.prompt) for source in rows]  # type: ignore[arg-type]
        else:
            prompts = cut_prompts(self._text_ids, row, block)
        return Work(row=row, prompts=prompts, bench=bench)


def read_bandwidth(num_threads: int) -> float:
    """Return bytes / s of reading one gigabyte with all threads: the best of a few sums."""
    import torch

    torch.set_num_threads(num_threads)
    numbers = torch.ones(_READ_NUMBERS)
    best_s = float("inf")
    for _ in range(_READS):
        started_s = time.perf_counter()
        numbers.sum()
        best_s = min(best_s, time.perf_counter() - started_s)
    return numbers.nbytes / best_s
