"""The HTML report: one file, no network."""
