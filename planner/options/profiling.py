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
        "float32", "float32, bfloat16 or float16 under autocast, or on GPUs tf32; also for `plan train`", "TYPE"
    )
    master_weights: bool = option(
        False,
        "weights are in `dtype`, without autocast; gradients are summed in float32, and the optimizer steps copies in "
        "float32, as in Megatron. `plan train` will do the same",
    )
    memory_format: Literal["channels-last"] | None = option(
        None, "channels-last stores weights and images pixel by pixel. `plan train` will do the same", told="contiguous"
    )
    compiled: bool = option(
        False, "run through torch.compile, or estimate so; `plan train` will do the same", flag="--compile"
    )
    tensor: Sequence[int] = option(
        (),
        "also profile, on this device alone, layers that so many ranks divide between them, as in 2,4,8, for `tensor` "
        "of `plan solve`; the model file or the model says which are divided",
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
        1, "workers that will train on this machine's CPU cores; one is measured while the others train beside it", "N"
    )
    deterministic: bool = option(
        False, "use only algorithms that give the same bits in every run. `plan train` will do the same"
    )
    seconds: float = option(SECONDS, "measure for S seconds after capture and warm-up, but at least three steps", "S")
    repeats: int = option(REPEATS, "measure at most N steps", "N")
    progress: Callable[[str, float], None] | None = option(None, "called with the phase and its share done", flag=None)


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(ModelOptions):
    """What `estimate` takes beside the model: one of `device` and `device_file`, and how the model runs there."""

    device: str | None = option(None, "name in the table of devices, such as v100, h100 or cpu", flag=None)
    device_file: str | Path | None = option(None, "estimate for the device that this JSON file describes", "FILE")
    host: str | None = option(
        None,
        "what launches a GPU's kernels, which wait for it where they are small: eager, compiled, fused or graphs (CUDA "
        "graphs of forward and backward); or its time per launch, as 35us",
        "KIND",
        told="eager, or compiled where a compiler fuses",
    )
    calibrate: Sequence[str | Path] = option(
        (), "fit the table to a profile of such a device, with its model.py beside it, or to a file of steps", "FILE"
    )
