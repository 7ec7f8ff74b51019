"""Measures any OpenAI-compatible server over HTTP, and compares servers in paired blocks.

This package knows nothing of the engine: what it reports is what a client sees. `records` are the
raw facts, one row per request; `metrics` and `window` turn them into numbers; `result` is one run
as flat JSON (vLLM's keys, ours under `sd_`); `paired` repeats runs over arms, loads and blocks.
Definitions, with units and how other tools differ: docs/metrics.md.
"""
