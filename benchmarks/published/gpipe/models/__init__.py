"""The two models of the GPipe paper."""
