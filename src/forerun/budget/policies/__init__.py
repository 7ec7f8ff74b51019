"""Budget policies, one file each: pure functions of what the controller gathers."""
