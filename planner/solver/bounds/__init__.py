"""What the searches know about each cost model: bounds, and the fewest replicas that meet a target."""
