"""Measuring what steps cost on this machine, and keeping it: the cost profile of the budget."""
