"""Find what a loss is a mean over, by trials that tell one answer from another."""
