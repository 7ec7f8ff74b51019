"""Lets `python -m forerun` stand for the `forerun` command."""

from __future__ import annotations

import sys

from forerun.cli import main

if __name__ == "__main__":
    sys.exit(main())
