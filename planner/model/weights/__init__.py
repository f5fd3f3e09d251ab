"""A stage's weights: which they are, and how they are made or kept in memory."""
