"""What a plan is made of: its shape, groups of ranks, shared weights and repeated blocks."""
