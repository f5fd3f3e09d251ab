"""Measured speed of the links between workers."""
