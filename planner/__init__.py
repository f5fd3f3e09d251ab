"""Automatic pipeline-parallel training: profile a model, find the fastest split, train it."""

__version__ = "0.1.0"
