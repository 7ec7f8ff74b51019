"""The ingredients of the default training prompts: where texts come from and what is asked of them.

Every ingredient yields (id, user text) pairs, the same in every run; training_prompts.py mixes.
"""
