"""Predicted against measured memory of a stage."""
