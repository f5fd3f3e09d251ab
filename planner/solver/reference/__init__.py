"""Plans to compare with: data parallelism and equal cuts."""
