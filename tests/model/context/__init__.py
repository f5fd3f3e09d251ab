"""Tests of `planner.model.context`."""
