"""Forerun beside vLLM CPU, llama.cpp and transformers: `python -m benchmarks.peers`.

Files: `rows` (what is measured), `rates` (from time stamps to tokens per second), `weights` and
`install` (what peers need), `adapters` (how each is driven), `workers` (programs that run in the
peers' own environments), `runner` (interleaved blocks), `figures` (medians, ratios, floor),
`quantised` and `report` (rows, bounds, tables).
"""
