"""Runs a plan: instruction streams + stage modules -> training."""
