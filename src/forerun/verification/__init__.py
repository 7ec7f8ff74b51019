"""Deciding which draft tokens to keep and which token comes next, without loss.

`rejection` holds the mathematics as pure functions, `layout` where rows and drafts lie, `methods`
one procedure per verification method, `verify` the entry point that groups a batch by method and
keeps one request's failure from the others.
"""
