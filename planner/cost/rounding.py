"""Rounding slack, for numbers that are added up in different orders."""

# A search adds up running sums, the cost model adds up the layers of a stage: the same time may differ in the last
# bits. Relative to a time (or in replicas and GPUs, which are small numbers) this is far above what rounding does in
# sums of thousands of layers, and far below any difference between plans that matters. Where a search rounds with it,
# it rounds towards too many plans, and the cost model itself decides.
SLACK = 1e-9
