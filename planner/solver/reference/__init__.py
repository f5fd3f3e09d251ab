"""Plans to compare with: brute force, data parallelism and equal cuts."""
