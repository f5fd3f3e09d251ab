"""Searches for the best plan by the cost model: over the cuts along the profile's order, on levels,
by programs.
"""
