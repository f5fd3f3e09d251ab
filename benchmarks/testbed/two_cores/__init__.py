"""Speed of two processes on two cores, compared with one process."""
