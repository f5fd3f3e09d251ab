"""PipeDream's Table 1, run on emulated devices."""
