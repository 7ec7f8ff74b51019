"""From what drafters say to chances that hold: temperatures, estimator, live statistics."""
