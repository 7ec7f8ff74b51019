"""Building blocks of a decoder: weights, norms, rotary embedding, MLP, attention.

Blocks take sizes and options, never a model's spec, and hold weights only. None of them knows how
weights are stored or what a request is. Forward runs without autograd: in-place operations are used
where a tensor has no other reader.
"""
