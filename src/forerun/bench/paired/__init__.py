"""Servers compared in blocks: `plan` (arms, loads, order), `runner`, `compare`, `server`."""
