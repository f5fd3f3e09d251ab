"""Failure detection: heartbeats, hangs, and the first cause of a failed run."""
