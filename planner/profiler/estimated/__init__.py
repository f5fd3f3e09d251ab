"""Estimate profiles for devices that need not be present."""
