"""Profiles measured on a device."""
