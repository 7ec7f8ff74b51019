"""Answers of the target with what it computed: generated, written, read in training order."""
