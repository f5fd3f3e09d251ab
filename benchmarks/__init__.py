"""Benchmarks: one folder per question, with its script, the command that runs it, and the
results.
"""
