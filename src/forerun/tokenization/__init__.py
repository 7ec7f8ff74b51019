"""Text to token ids and back, for Hugging Face folders and GGUF files. No torch, no transformers.

Both the API process and the engine load a tokenizer, so nothing here may import either library:
start-up time and the memory of the API process depend on it.
"""

from __future__ import annotations

from pathlib import Path

from forerun.errors import ConfigError
from forerun.tokenization.gguf import load_gguf_tokenizer
from forerun.tokenization.hf import load_hf_tokenizer
from forerun.tokenization.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model: a Hugging Face folder or a GGUF file."""
    if path.is_dir():
        return load_hf_tokenizer(path)
    if path.is_file():
        return load_gguf_tokenizer(path)
    raise ConfigError(f"{path} does not exist; give a Hugging Face folder or a GGUF file.")
