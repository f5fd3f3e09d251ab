"""What a plan is worth: its price, the depth of its pipeline, its simulated time."""
