"""How to measure or estimate a model: the options of `profile` and `estimate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.options.numbers import degrees
from planner.options.option import Options, option

BATCH_SIZE = 32
SECONDS = 20.0  # of measuring
REPEATS = 50  # steps measured, at most


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """How a model is run, and so how its plans will train it."""

    batch_size: int = option(
        BATCH_SIZE, "samples per minibatch, or per microbatch for schedules that divide minibatches", "N"
    )
    dtype: str = option(
        "float32",
        "float32, bfloat16 or float16 under autocast, or on GPUs tf32 for matrix products in TF32. `plan train` will "
        "use the same",
        "TYPE",
    )
    memory_format: Literal["channels-last"] | None = option(
        None,
        "channels-last stores weights and images pixel by pixel, which many convolution kernels prefer. `plan train` "
        "will do the same",
        told="contiguous",
    )
    compiled: bool = option(
        False,
        "run through torch.compile, which needs a C++ compiler on a CPU; estimates, of GPUs, fuse chains of operations "
        "as it does. `plan train` will do the same",
        flag="--compile",
    )
    tensor: Sequence[int] = option(
        (),
        "also profile layers that so many ranks divide between them, as in 2,4,8, for `tensor` of `plan solve`; the "
        "model file or the model says which are divided. One device does, as the first of these ranks; what ranks "
        "all-reduce is counted, and takes what the links of a cluster take",
        "T,T",
        parse=degrees,
    )


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(ModelOptions):
    """How a model is measured."""

    device: str | None = option(
        None,
        "cpu, cuda, cuda:1 or another kind that PyTorch offers",
        "KIND",
        told="a GPU where PyTorch sees any, else cpu",
    )
    threads: int = option(1, "CPU cores per worker", "N")
    processes: int = option(
        1,
        "workers that will train on this machine's CPU cores. One is measured while the others train beside it, "
        "because they compete for caches and memory bandwidth",
        "N",
    )
    deterministic: bool = option(
        False, "use only algorithms that give the same bits in every run. `plan train` will do the same"
    )
    seconds: float = option(SECONDS, "measure for S seconds after capture and warm-up, but at least three steps", "S")
    repeats: int = option(REPEATS, "measure at most N steps", "N")
    layer_by_layer: bool = option(
        False,
        "have only some layers at a time on the device, and the rest of the model in the host's memory; a model that "
        "does not fit a GPU is measured so in any case",
    )
    progress: Callable[[str, float], None] | None = option(
        None, "called with the phase and how much of it is done, 0 to 1", flag=None
    )


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(ModelOptions):
    """What `estimate` takes beside the model: one of `device` and `device_file`, and how the model runs there."""

    device: str | None = option(None, "name in the table of devices, such as v100, h100 or cpu", flag=None)
    device_file: str | Path | None = option(None, "estimate for the device that this JSON file describes", "FILE")
    master_weights: bool = option(
        False,
        "weights and gradients are in `dtype`, and the optimizer updates copies in float32, as in Megatron: 16 bytes "
        "per parameter with Adam. Such a profile can be solved and priced, but not trained here",
    )
    cuda_graph: bool = option(
        False,
        "forward and backward are captured as CUDA graphs, so that small kernels do not wait for the host. `plan "
        "train` runs them one by one",
    )
    calibrate: Sequence[str | Path] = option(
        (),
        "fit the table to this profile, measured on such a device, with its model.py beside it; or to whole steps "
        "whose times are known, as a JSON file lists them; may be repeated",
        "FILE",
    )
