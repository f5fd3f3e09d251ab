"""What a worker's host spends on a microbatch beyond its stage's operations."""
