"""Time and memory of sharded and of recomputing stages, predicted and measured."""
