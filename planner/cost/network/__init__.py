"""What messages and all-reduces take: links, levels, buckets, and who talks to whom."""
