"""Defaults of `plan train`, apart from the code that imports torch: the command line's help shows them."""

STEPS = 100  # where the model file has no dataset(), and so no epoch to go by
HANG_TIMEOUT_S = 120.0  # beyond the slowest instruction
TRACE_MINIBATCHES = 100  # the last ones of the run
CHECKPOINT_FOLDER = "checkpoints"
CHECKPOINTS_KEPT = 3
