"""One file per check: what it asks, and its cases."""
