"""Integer programs for what the exact search cannot express."""
