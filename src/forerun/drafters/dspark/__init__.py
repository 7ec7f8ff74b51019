"""The block drafter of methods "dspark" and "dflash": one backbone, with and without heads.

config.py and dialects.py say what a checkpoint holds, network.py and heads.py compute it with
autograd, checkpoint.py reads and writes it. This file exports what needs no torch.
"""

from __future__ import annotations

from forerun.drafters.dspark.config import DSparkConfig

__all__ = ["DSparkConfig"]
