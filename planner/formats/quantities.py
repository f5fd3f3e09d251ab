"""Numbers in files, each with the range in which it can mean something.

A number beyond its range is a mistake of whoever wrote the file. Without a bound it would be found
where it does harm: ten thousand threads that a worker starts, a list of a billion ranks.
"""

from typing import Annotated

from pydantic import Field

MOST_GPUS = 2**17  # of a cluster: a plan names every rank
MOST_THREADS = 2**12  # of a process: no CPU has as many cores
MOST_SAMPLES = 2**31  # of a minibatch
MOST_PARTS = 2**20  # of a minibatch, or in flight at once
LEAST_RATE, MOST_RATE = 1e-9, 1e30  # bytes per second

# Integers.
Bytes = Annotated[int, Field(ge=0, le=2**62)]
SomeBytes = Annotated[int, Field(ge=1, le=2**62)]
Rank = Annotated[int, Field(ge=0, lt=MOST_GPUS)]
Workers = Annotated[int, Field(ge=1, le=MOST_GPUS)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
Parts = Annotated[int, Field(ge=1, le=MOST_PARTS)]
Number = Annotated[int, Field(ge=0, le=2**62)]  # of a minibatch, a stage and the like, from 0
FloatingOperations = Annotated[int, Field(ge=0, le=2**100)]

# Floating-point numbers.
Seconds = Annotated[float, Field(ge=0, le=1e15)]  # what is above is no time, and would overflow
BytesPerSecond = Annotated[float, Field(ge=LEAST_RATE, le=MOST_RATE)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
