"""Time and memory of profiling."""
