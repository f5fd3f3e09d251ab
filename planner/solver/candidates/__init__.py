"""Candidate plans: which ones are simulated, how deep they run, and at what cost."""
