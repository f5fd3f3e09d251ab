"""Checkpoints and trained weights on disk."""
