"""Max-load on the published dnn-partitioning workloads."""
