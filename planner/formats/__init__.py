"""The files that users see: profile, plan, cluster, constraints and timeline."""
