"""Tensor parallelism: which weights a group of ranks divides, and how a stage computes with their
parts.
"""
