"""Predicted and measured memory of a stage."""
