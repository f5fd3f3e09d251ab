"""Questions around a plan: compare it with others, explain it, sweep the cluster, compare it with a measured run."""
