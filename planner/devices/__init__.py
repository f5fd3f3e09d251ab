"""Where workers compute and what they send with: chosen by one rule, from what all of them say at the start."""
