"""Searches for the best plan by the cost model: over the cuts along an order, over all cuts, on levels, by programs."""
