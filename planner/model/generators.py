"""The generators that user code draws from: Python's, NumPy's, PyTorch's. Seeded together, restored
together.

Workers read the data for themselves, each another part of it, and their layers draw random numbers
in between. So no worker may read with the state in which its generators happen to be: each item and
each batch has a seed of its own, which follows from its place in the data alone.
docs/guides/own-model.md shows the same in plain PyTorch.
"""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planner.model.randomness import CPU, generators_kept
from planner.runtime import runtime_of

State = tuple[object, ...]  # of several generators; equal if they would give the same numbers


def data_seed(seed: int, epoch: int | str, what: str, number: int) -> int:
    """Return the seed, below 2^32, with which a part of the data is read.

    Args:
        seed: of the run.
        epoch: number of the epoch, from 0; "evaluation" for evaluation data, which are drawn alike
            each time.
        what: "item" for an item of the dataset, "collate" for a batch, "order" for the order of an
            epoch.
        number: index of the item, or place of the batch's first sample in the epoch's order; 0 for
            an order.
    """
    text = f"{seed}/{epoch}/{what}/{number}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def seed_generators(seed: int) -> None:
    """Seed all generators, as a script does at its beginning."""
    torch.manual_seed(seed)
    _seed_others(seed)


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Let user code draw random numbers of a seed, and restore the generators of host and `device`
    afterwards.
    """
    with generators_kept(device):
        seed_generators(seed)
        yield


def seed_quickly(seed: int, device: torch.device) -> None:
    """Seed the host's generators and that of `device`, in about 7 microseconds on a CPU.

    `torch.manual_seed` gives PyTorch's generator the same state and takes 120, because it looks for
    all devices.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        runtime_of(device).seed(device, seed)
    _seed_others(seed)


def state_of_generators(device: torch.device = CPU) -> State:
    """Return the state of the host's generators and of that of `device`."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    device_state = b""
    if device.type != "cpu":
        device_state = runtime_of(device).random_state(device).cpu().numpy().tobytes()
    return torch_state, device_state, *state_of_others()


def state_of_others() -> State:
    """Return the state of Python's and NumPy's generators, which no layer of a model draws from."""
    import numpy.random  # not at the top: importing it takes longer than all else here

    state = numpy.random.get_state(legacy=False)
    numbers = state["state"]
    rest = (numbers["pos"], state["has_gauss"], state["gauss"])
    return random.getstate(), numbers["key"].tobytes(), *rest


def _seed_others(seed: int) -> None:
    import numpy.random  # as above

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # which takes no other seeds
