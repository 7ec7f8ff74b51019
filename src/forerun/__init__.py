"""Forerun: LLM serving with speculative decoding that adapts to load.

Names are imported on first use, so that `import forerun` stays free of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forerun.env import limit_openmp_spinning

if TYPE_CHECKING:
    from forerun.config import EngineConfig
    from forerun.core import SamplingParams
    from forerun.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "__version__"]

# OpenMP reads its variables when it is loaded: before torch, and for every process started later.
limit_openmp_spinning()

_LAZY = {
    "LLM": "forerun.engine.llm",
    "SamplingParams": "forerun.core",
    "EngineConfig": "forerun.config",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'forerun' has no attribute {name!r}")
