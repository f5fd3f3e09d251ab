"""Environment variables that CUDA and NCCL read at their start, with the values that a pipeline needs.

CUDA_DEVICE_MAX_CONNECTIONS: hardware queues of a GPU, 8 unless set, 32 at most. A worker has a stream for computation,
one for each communicator and one for receives. Streams that share a queue wait for each other's launches: a send whose
peer is not ready would hold back the receive behind it, and the peer may be waiting for that very worker.

NCCL_RUNTIME_CONNECT: with 0 NCCL makes all connections of a communicator when it is made. Otherwise it makes those of
an algorithm (a ring, a tree) at the first all-reduce of a size for which it chooses that algorithm: in the middle of
training, where it allocates memory and waits for the other members.
"""

from __future__ import annotations

import os

CUDA_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_RUNTIME_CONNECT": "0"}


def set_cuda_variables() -> None:
    """Set those that the user has not set, for this process; before CUDA starts in it."""
    for name, value in CUDA_VARIABLES.items():
        os.environ.setdefault(name, value)
