"""What steps cost: the measured profile, files of other engines, and the online correction."""
