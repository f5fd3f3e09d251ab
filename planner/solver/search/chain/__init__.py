"""Searches over plans that cut the layers in a given order of states."""
