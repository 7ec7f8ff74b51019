"""The paged KV cache: block bookkeeping on the host, K/V tensors on the device."""
