"""Proposers: each yields candidate plans for a question, promising ones first."""
