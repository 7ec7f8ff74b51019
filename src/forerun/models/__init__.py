"""Model families. Registry: Hugging Face architecture name -> lazy class.

Adding a family is one file here and one line in MODELS (and in GGUF_ARCHITECTURES when GGUF files
of it exist).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.errors import ConfigError

if TYPE_CHECKING:
    from forerun.models.decoder import DecoderModel


def _llama() -> type[DecoderModel]:
    from forerun.models.llama import LlamaModel

    return LlamaModel


def _qwen2() -> type[DecoderModel]:
    from forerun.models.qwen2 import Qwen2Model

    return Qwen2Model


def _qwen3() -> type[DecoderModel]:
    from forerun.models.qwen3 import Qwen3Model

    return Qwen3Model


def _gemma3() -> type[DecoderModel]:
    from forerun.models.gemma3 import Gemma3Model

    return Gemma3Model


MODELS: dict[str, Callable[[], type[DecoderModel]]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Gemma3ForCausalLM": _gemma3,
}

GGUF_ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def find_model_class(architecture: str) -> type[DecoderModel]:
    """Return the class of a Hugging Face architecture name; raises ConfigError."""
    if architecture not in MODELS:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(MODELS)}."
        )
    return MODELS[architecture]()
