"""Run one step of a model, or of some of its layers, and read its times, bytes and operations."""
