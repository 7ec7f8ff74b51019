"""Training a block drafter: target answers with hidden states on disk, loss, optimiser, loop.

Reads targets through the offline `LLM` and drafters through `drafters.dspark`; knows nothing of the
engine's inside.
"""
