"""The block drafter of methods "dspark" and "dflash": one backbone, with and without heads."""

from __future__ import annotations

from forerun.drafters.dspark.config import DSparkConfig

__all__ = ["DSparkConfig"]
