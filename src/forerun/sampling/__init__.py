"""From logits to tokens: noise, logits processors, filters, logprobs.

Everything here is a pure function of its inputs, except that `penalties` remembers which tokens a
request has seen. It knows nothing of drafts beyond "tokens assumed before this row", and nothing
of scheduling; `verification` builds on it, and drafters draw from the same noise.
"""
