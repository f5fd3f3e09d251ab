"""Simulate instruction streams at given costs, without running anything."""
