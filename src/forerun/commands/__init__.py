"""Subcommands of the command line, one module each; `forerun.cli` puts them together."""
