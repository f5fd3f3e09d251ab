"""Defaults that depend on the schedule."""

MICROBATCHES_PER_GPU = 4  # from which on GPipe (Huang et al. 2019, section 2.3) calls its bubble negligible
CHUNKS = 2  # of the model on each GPU, where a schedule interleaves them
LATE_UPDATES = 4  # gradients that are more updates late than this are worth a warning
MOMENTUM_UPDATES = 3  # from so many on, large momentum has made losses larger by 10% and more
