"""A pipeline that a user's own training loop feeds."""
