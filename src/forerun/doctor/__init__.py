"""What this machine uses, and why: facts and problems behind `forerun doctor`.

Every check is a pure function from what was read to a Section; reading it from the machine is in
diagnose.py and in the small `read_*` and `find_*` functions, which take the place to read from.
"""
