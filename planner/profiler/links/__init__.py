"""Measure the links between workers."""
