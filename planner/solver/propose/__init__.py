"""Proposers: each yields candidate plans for a problem, promising ones first."""
