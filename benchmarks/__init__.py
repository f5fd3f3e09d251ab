"""Measurements: one folder per question, with the script, the command and the table of results."""
