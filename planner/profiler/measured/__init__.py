"""Measure profiles on a device."""
