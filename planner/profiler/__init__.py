"""Turn a LayerGraph and a device into a Profile, and measure the links between workers.

The defaults of `plan profile` are here, apart from the code that imports torch: the command line's help shows them.
"""

BATCH_SIZE = 32
SECONDS = 20.0  # of measuring
REPEATS = 50  # steps measured, at most
