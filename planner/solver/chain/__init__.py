"""Exact search over plans that cut a chain of layers."""
