"""GPipe's throughput and largest-model tables."""
