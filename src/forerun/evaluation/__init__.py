"""How good a drafter is on real answers, and temperatures that make its confidences true."""
