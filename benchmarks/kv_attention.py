"""What attention costs over a pool in bfloat16 and one in int8, measured side by side.

Each pass is one decoding step's attention alone: all layers of a model's shape, one new row per
request behind a full context, K/V of every layer in memory of their own, in blocks of shuffled
order. Passes over the two pools take turns: the machine's bandwidth moves by half within minutes.
The floor is the bytes a pass reads over the bandwidth measured at the end. Prints medians, spread
and the median ratio of neighbours; the last line is JSON.

    python benchmarks/kv_attention.py                     # SmolLM2-135M's shape, 32 x 1,024
    python benchmarks/kv_attention.py --requests 4 --context 8192 --heads 14 --kv-heads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.attention import build_attention_backend
from forerun.attention.base import AttentionBackend, AttentionBatch, AttentionLayer
from forerun.cache.kv_store import KVLayerShape, KVStore, compute_block_bytes
from forerun.doctor.bandwidth import measure_read_bandwidth
from forerun.kernels import explain_kernels, find_kernels
from forerun.quantisation.rows import quantise_rows

KV_BLOCK_SIZE = 16


def build_batch(num_reqs: int, length: int) -> AttentionBatch:
    """Return one row per request at position `length` - 1; blocks lie in shuffled order."""
    width = -(-length // KV_BLOCK_SIZE)
    blocks = 1 + np.random.default_rng(0).permutation(num_reqs * width)
    tables = blocks.reshape(num_reqs, width)
    block, offset = divmod(length - 1, KV_BLOCK_SIZE)
    return AttentionBatch(
        query_start_loc=np.arange(num_reqs + 1),
        context_lens=np.full(num_reqs, length - 1),
        block_tables=tables,
        slot_mapping=tables[:, block] * KV_BLOCK_SIZE + offset,
    )


def build_store(layers: list[KVLayerShape], num_blocks: int, dtype: torch.dtype) -> KVStore:
    """Return a pool whose blocks all hold the same normal numbers."""
    store = KVStore(
        layers, num_blocks=num_blocks, kv_block_size=KV_BLOCK_SIZE, dtype=dtype, device="cpu"
    )
    shape = (layers[0].num_kv_heads, KV_BLOCK_SIZE, layers[0].head_dim)
    rows = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if store.is_quantised:
        rows, scales = quantise_rows(rows)
        for pool in (*store.key_scales, *store.value_scales):
            pool[:] = scales
    for pool in (*store.keys, *store.values):
        pool[:] = rows
    return store


@torch.inference_mode()
def run_pass(
    backend: AttentionBackend,
    store: KVStore,
    batch: AttentionBatch,
    layers: list[AttentionLayer],
    rows: tuple[Tensor, Tensor, Tensor],
) -> float:
    """Return the milliseconds of all layers' attention."""
    started_s = time.perf_counter()
    metadata = backend.prepare(batch, store)
    for layer in layers:
        backend.attend(*rows, layer=layer, kv_store=store, metadata=metadata)
    return (time.perf_counter() - started_s) * 1e3


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the passes' figures by pool type; `times_ms` are in the order they were taken."""
    shape = KVLayerShape(num_kv_heads=args.kv_heads, head_dim=args.head_dim)
    heads = {"num_heads": args.heads, "num_kv_heads": args.kv_heads, "head_dim": args.head_dim}
    layers = [
        AttentionLayer(index=index, scale=args.head_dim**-0.5, **heads)
        for index in range(args.layers)
    ]
    backend = build_attention_backend("native")
    batch = build_batch(args.requests, args.context)
    widths = (args.heads, args.kv_heads, args.kv_heads)
    query, key, value = (torch.randn(args.requests, n, args.head_dim).bfloat16() for n in widths)
    num_blocks = batch.block_tables.size + 1
    stores, figures = {}, {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("int8", torch.int8)):
        stores[name] = build_store([shape] * args.layers, num_blocks, dtype)
        per_token = compute_block_bytes([shape] * args.layers, kv_block_size=1, dtype=dtype)
        figures[name] = {"bytes": args.requests * args.context * per_token, "times_ms": []}
    for repeat in range(args.repeats + 1):
        for name, store in stores.items():
            took_ms = run_pass(backend, store, batch, layers, (query, key, value))
            if repeat > 0:
                figures[name]["times_ms"].append(took_ms)
    return figures


def main() -> None:
    """Measure and print one line per pool, JSON last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024, help="positions, the new row included")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    assert find_kernels() is not None, f"nothing native to measure: {explain_kernels()}"
    figures = measure(args)
    bandwidth = measure_read_bandwidth()
    for name, row in figures.items():
        times = sorted(row["times_ms"])
        row["median_ms"] = statistics.median(times)
        row["p10_p90_ms"] = [times[len(times) // 10], times[len(times) * 9 // 10]]
        row["floor_ms"] = row["bytes"] / bandwidth * 1e3
        print(
            f"{name:>8}: {row['median_ms']:.1f} ms ({times[len(times) // 10]:.1f} - "
            f"{times[len(times) * 9 // 10]:.1f}), {row['bytes'] / 1e6:.0f} MB at "
            f"{row['bytes'] / row['median_ms'] / 1e6:.1f} GB/s, floor {row['floor_ms']:.1f} ms"
        )
    pairs = zip(figures["int8"]["times_ms"], figures["bfloat16"]["times_ms"], strict=True)
    ratios = sorted(quantised / plain for quantised, plain in pairs)
    ratio = statistics.median(ratios)
    spread = [ratios[len(ratios) // 10], ratios[len(ratios) * 9 // 10]]
    print(f"int8 / bfloat16: {ratio:.2f} ({spread[0]:.2f} - {spread[1]:.2f})")
    settings = {**vars(args), "kernels": explain_kernels(), "threads": torch.get_num_threads()}
    print(
        json.dumps(
            {
                "benchmark": "kv_attention",
                "settings": settings,
                "bandwidth": bandwidth,
                "pools": figures,
                "ratio": ratio,
                "ratio_p10_p90": spread,
            }
        )
    )


if __name__ == "__main__":
    main()
