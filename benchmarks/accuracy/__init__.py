"""How far a mode's numbers are from float32's: `python -m benchmarks.accuracy`.

Files: `text` (what is read), `arms` (the modes, and a forward through the engine), `comparison`
(all arms in lockstep), `measures` (KL, top-1, perplexity), `outputs` (greedy answers compared),
`report` (bounds and tables).
"""
