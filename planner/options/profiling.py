"""How to measure or estimate a model: the options of `profile` and `estimate`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.errors import InputError
from planner.formats.names import STACKS, StackName
from planner.options.numbers import degrees
from planner.options.option import Options, option

BATCH_SIZE = 32
SECONDS = 20.0  # of measuring
REPEATS = 50  # steps measured, at most


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """How a model is run, and so how its plans will train it."""

    batch_size: int = option(
        BATCH_SIZE,
        "micro batch: samples of one forward. A global batch has one or several of them, "
        "depending on the schedule",
        "N",
        aliases=("--micro-batch-size",),
    )
    dtype: str = option(
        "float32",
        "float32, bfloat16 or float16 under autocast, or on GPUs tf32; also for `plan train`",
        "TYPE",
    )
    master_weights: bool = option(
        False,
        "weights are in `dtype`, without autocast; gradients are accumulated in float32, and the "
        "optimizer steps "
        "float32 master weights, as in Megatron. `plan train` will do the same",
        advanced=True,
    )
    memory_format: Literal["channels-last"] | None = option(
        None,
        "channels-last keeps the channels of a pixel together. `plan train` will do the same",
        told="contiguous",
        advanced=True,
    )
    compile: bool = option(
        False,
        "run through torch.compile, or estimate so; `plan train` will do the same",
        advanced=True,
    )
    tensor: Sequence[int] = option(
        (),
        "also profile layers under tensor parallelism of these degrees, as in 2,4,8, for `tensor` "
        "of `plan solve`; one "
        "device is enough, and the model file or the model says which layers are sharded",
        "T,T",
        parse=degrees,
        aliases=("--tensor-parallel-size",),
    )
    context: Sequence[int] = option(
        (),
        "also price layers under context parallelism of these degrees, as in 2,4,8: that many "
        "ranks shard every sequence; not with `tensor`",
        "C,C",
        parse=degrees,
        aliases=("--context-parallel-size",),
        advanced=True,
    )

    def check_degrees(self) -> None:
        """Raise InputError where groups of one size would stand for two things."""
        if max(self.context, default=1) > 1 and max(self.tensor, default=1) > 1:
            raise InputError(
                f"a profile has one entry for groups of each size, and `context="
                f"{','.join(map(str, self.context))}` and `tensor="
                f"{','.join(map(str, self.tensor))}` both make groups",
                hint="leave out one of them; `plan fit` combines them",
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
    threads: int = option(1, "CPU cores per worker", "N", advanced=True)
    processes: int = option(
        1,
        "workers that will train on this machine's CPU cores; one is measured while the others "
        "train",
        "N",
        advanced=True,
    )
    deterministic: bool = option(
        False,
        "use only algorithms that give the same bits in every run. `plan train` will do the same",
        advanced=True,
    )
    seconds: float = option(
        SECONDS,
        "measure for S seconds after capture and warm-up, but at least three steps",
        "S",
        advanced=True,
    )
    repeats: int = option(REPEATS, "measure at most N steps", "N", advanced=True)
    progress: Callable[[str, float], None] | None = option(
        None, "called with the phase and its share done", flag=None
    )


@dataclass(frozen=True, kw_only=True)
class EstimateArguments(ModelOptions):
    """What `estimate` takes beside the model: one of `device` and `device_file`, and how the model
    runs there.
    """

    device: str | None = option(
        None, "name in the table of devices, such as v100, h100 or cpu", flag=None
    )
    device_file: str | Path | None = option(
        None,
        "estimate for the device that this JSON file describes",
        "FILE",
        advanced=True,
    )
    precision: str | None = option(
        None,
        "products of linear layers in 8 bits: fp8, or on B200, GB200 and B300 mxfp8; all else as "
        "`dtype` and `master_weights` say. `plan train` does not run it",
        "FORMAT",
        told="that of `dtype`",
        advanced=True,
    )
    stack: StackName | None = option(
        None,
        "what runs the operators: eager (PyTorch one by one), compiled (torch.compile, one kernel "
        "for any attention, cross entropy in chunks) or megatron (Transformer Engine's kernels, "
        "sequence parallelism); `plan train` says which of it it does not run",
        told="eager",
        choices=STACKS,
        advanced=True,
    )
    host: str | None = option(
        None,
        "what launches the GPU's kernels, which limits models of small kernels: eager, compiled, "
        "fused or graphs (CUDA graphs); or the time per launch, as 35us",
        "KIND",
        told="eager, or compiled where a compiler fuses",
        advanced=True,
    )
