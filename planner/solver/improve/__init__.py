"""Local search from the best plans."""
