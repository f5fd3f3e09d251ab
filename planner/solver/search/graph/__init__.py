"""Search over the cuts of branching models (downsets)."""
