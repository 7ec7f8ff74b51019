"""Quantised weights: block formats, what their bytes mean, and how to make and multiply them.

formats.py names the formats that are computed as they are stored, decode.py reads their numbers,
check.py refuses broken scales, quantise.py makes Q8_0 from floats, rows.py makes rows of K/V and of
activations int8, reference.py multiplies in PyTorch with the arithmetic of the native kernels.
Nothing here knows files, models or layers.
"""
