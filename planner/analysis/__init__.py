"""Questions around a plan: compare it with others, explain it, compare it with a measured run."""
