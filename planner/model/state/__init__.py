"""What a forward reads and changes beside weights: buffers, statistics, random numbers."""
