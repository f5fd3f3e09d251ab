"""The `plan` command: one file per verb; parse, call, render."""
