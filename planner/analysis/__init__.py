"""Questions around a plan: what other plans would give, how it changes with the cluster, and why it is as it is."""
