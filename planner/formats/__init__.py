"""The files that users see: profile, plan, cluster and timeline."""
