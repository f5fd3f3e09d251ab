"""Time and memory that profiling takes."""
