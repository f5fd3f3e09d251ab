"""Context parallelism: ranks that divide the sequences of every microbatch."""
