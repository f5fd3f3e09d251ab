"""What a run measures and records about itself."""
