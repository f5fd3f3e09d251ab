"""Process groups, point-to-point messages and all-reduces between workers."""
