"""Profiles estimated for a device that need not be present."""
