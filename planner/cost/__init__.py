"""What layers, stages, links and memory cost, and the price of a whole plan. No torch."""
