"""What else verbs take: `price`, `fit`, `report`, `quickstart` and `selftest`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.formats.link_names import BETWEEN_SERVERS
from planner.formats.names import (
    PLANNED,
    Backend,
    CodecName,
    DeviceType,
    OffloadName,
    StackName,
    StateName,
)
from planner.options.cluster import ClusterOptions, Quantities, sizes_of_levels
from planner.options.kinds import EXAMPLE, RATES_EXAMPLE, gpu_kinds, link_rates
from planner.options.numbers import degrees, microbatch_counts, names, token_count
from planner.options.option import Options, option, same
from planner.options.profiling import EstimateArguments
from planner.options.solving import Progress, SolveOptions, StageRules
from planner.options.training import TrainArguments
from planner.schedule.one_stage import FLUSH
from planner.schedule.schedule import Schedule
from planner.stages.context import LONG_TOKENS, USUAL_CONTEXT
from planner.units import parse_bytes

if TYPE_CHECKING:
    from planner.formats.profile import Profile
    from planner.formats.timeline import Timeline

# of a minibatch that a schedule does not divide: tokens where samples have many
TOKENS = 2048
SAMPLES = 16
PER_SERVER = 8  # GPUs
TENSOR = (2, 4, 8)  # ranks that are tried to divide layers inside a server
# with what simulation and page take besides, a report of 56 stages is there within 10 s
REPORT_S = 7.0


@dataclass(frozen=True, kw_only=True)
class PriceOptions(Options):
    """How stages of one's own run."""

    replicas: str | int | Sequence[int | str] | None = option(
        None,
        "replicas of each stage, or of all; 2x4 are two replicas of four tensor-parallel ranks",
        "R|R,R",
        told="as many replicas as the GPUs allow for all",
    )
    recompute: str | bool | Sequence[int] | Mapping[int, int | str] = option(
        (),
        "activation checkpointing: stages, counted from 0, that run forward again instead of "
        "keeping activations; "
        "with :N only the first N blocks in the stage, as in all:4 or 0:4,1:2; with :attention "
        "the attention of every block alone",
        "all|S,S:N",
        told="none",
    )
    shard_optimizer: str | bool | Sequence[int] = option(
        (),
        "stages whose replicas shard the optimizer's state and its update (ZeRO-1); all: those "
        "that have two replicas "
        "or more; of a plan's only stage, with :2 the gradients, too, and with :3 the weights, "
        "too, as in all:3; with "
        "/N in groups of N replicas that repeat each other (HSDP), as in all:3/8",
        "all|S,S:L/N",
        told="none",
        advanced=True,
    )
    schedule: Schedule | str = same(SolveOptions, "schedule")
    microbatches: int | None = same(
        SolveOptions,
        "microbatches",
        least=1,
        help="microbatches of a global batch, on all replicas together, under schedules that have "
        "several",
    )
    chunks: int = same(SolveOptions, "chunks", least=1)
    accept_divided_loss: bool = same(SolveOptions, "accept_divided_loss")


@dataclass(frozen=True, kw_only=True)
class FitOptions(SolveOptions):
    """Which GPUs a model is to fit, and how it is trained there."""

    gpu: str | Mapping[str, int] = option(
        "a100-80gb",
        f"kind of GPU; of several kinds how many there are of each, as in {EXAMPLE}, in the order "
        f"of their servers",
        "NAME|NAME=N,NAME=N",
        parse=gpu_kinds,
    )
    servers: int | None = same(ClusterOptions, "servers", told=f"up to {PER_SERVER} GPUs in each")
    gpus_per_server: int | None = same(ClusterOptions, "gpus_per_server")
    topology: str | Sequence[int] | None = option(
        None,
        "GPUs per server x servers: 4x2 are 2 servers of 4 GPUs, as with `servers=2` and "
        "`gpus_per_server=4`",
        "SIZES",
        parse=sizes_of_levels,
    )
    bandwidth: Quantities | Mapping[str, Quantities] | None = option(
        None,
        "bandwidth of each GPU's link inside a server, then that of each server's: pcie4,10Gbps; "
        "the latter alone, 10Gbps, where the GPUs have the links of their kind, or servers one GPU "
        "each; kinds of GPUs may have their own: "
        f"{RATES_EXAMPLE}",
        "RATE",
        parse=link_rates,
        told=f"what such GPUs usually have; between servers {BETWEEN_SERVERS}, and 400Gbps per "
        f"GPU of H100 and later",
    )
    cluster: str | Path | None = option(
        None,
        "read the servers, their GPUs and the links between them from cluster.json, as measured by "
        "plan profile `links`, in place of the options above",
        "FILE",
        parse=Path,
        advanced=True,
    )
    memory: int | str | None = option(
        None,
        "memory of each GPU",
        "SIZE",
        parse=parse_bytes,
        told=f"{PLANNED} of what its kind has",
    )
    compress: CodecName = same(ClusterOptions, "compress", "none", told="none")
    offload: OffloadName | None = same(ClusterOptions, "offload")
    host_bandwidth: float | str | None = same(ClusterOptions, "host_bandwidth")
    length: int | None = option(None, "tokens of a sample", "N", least=1, told="up to 2048")
    lora: int | None = option(
        None,
        "fine-tune with LoRA: freeze the model, and train adapters of rank N on all linear layers "
        "but the head",
        "N",
        least=1,
    )
    bits: int | None = option(
        None,
        "with `lora`: keep the frozen linear layers in 4 bits (QLoRA), to say what fits and how "
        "fast it would be; `plan train` does not run it",
        "4",
        advanced=True,
    )
    optimizer_states: StateName = option(
        "float32",
        "type of AdamW's moments in the model file that is written: bfloat16 halves their memory, "
        "with a second beta of 0.95; int8 keeps a byte of each, with a scale for every 256",
        advanced=True,
    )
    megatron: str | None = option(
        None,
        "price these options of Megatron-LM's command line, all in one pair of quotation marks, "
        "say what limits them, and give better ones",
        "OPTIONS",
        advanced=True,
    )
    torchtitan: str | Path | None = option(
        None,
        "price the run of a TOML file of torchtitan, say what limits it, and give a better one",
        "FILE",
        parse=Path,
        advanced=True,
    )
    deepspeed: str | Path | None = option(
        None,
        "the same for a JSON file of DeepSpeed; what it leaves to the script, `batch_size` and "
        "`minibatch` say, and `recompute` whether layers recompute",
        "FILE",
        parse=Path,
        advanced=True,
    )
    accelerate: str | Path | None = option(
        None,
        "the same for a YAML file of `accelerate config`, which needs PyYAML",
        "FILE",
        parse=Path,
        advanced=True,
    )
    batch_size: int | None = option(
        None,
        "samples of a microbatch: what one forward gets",
        "N",
        least=1,
        told="the fastest of a few powers of two",
        aliases=("--micro-batch-size",),
    )
    minibatch: int | None = same(
        SolveOptions, "minibatch", told="that of `tokens`, or 4 microbatches per GPU"
    )
    tokens: int | None = option(
        None,
        "global batch of about N tokens, in place of `minibatch`",
        "N",
        parse=token_count,
        told="500k, 1M, 2M or 4M, from 1, 5 and 100 billion parameters on; 16 samples where most "
        "of the model is frozen",
        advanced=True,
    )
    train_tokens: int | None = option(
        None,
        "also say how many days a training on so many tokens takes, as in 15T, on these GPUs and "
        "on others",
        "N",
        parse=token_count,
        advanced=True,
    )
    dollars_per_gpu_hour: float | None = option(
        None,
        "also say what that costs, where an hour of a GPU costs so many dollars",
        "DOLLARS",
        positive=True,
        advanced=True,
    )
    dtype: str | None = option(
        None,
        "type of products and weights, with float32 master weights, as with `master_weights` of "
        "`plan profile`",
        told="bfloat16 where the GPU has it, or float16",
    )
    autocast: bool = option(
        False,
        "keep weights in float32, with products in `dtype` under autocast",
        advanced=True,
    )
    precision: str | None = same(EstimateArguments, "precision")
    stack: StackName | None = same(
        EstimateArguments,
        "stack",
        told="compiled for a model of transformers, eager for a model file",
    )
    tensor: Sequence[int] = same(
        SolveOptions,
        "tensor",
        told="1, 2, 4 and 8 inside a server, where the layers can be sharded",
    )
    context: Sequence[int] = option(
        (),
        "degrees of context parallelism to try, as in 1,2,4: that many ranks shard every sequence",
        "C,C",
        parse=degrees,
        aliases=("--context-parallel-size",),
        told=f"1, and from {LONG_TOKENS:,} tokens a sample on also "
        f"{', '.join(map(str, USUAL_CONTEXT))} inside a server",
        advanced=True,
    )
    schedule: Schedule | str = same(
        SolveOptions,
        "schedule",
        FLUSH,
        told=f"{FLUSH}, because this verb plans training that equals one device: no gradient is "
        "stale",
    )
    place: str | Path | None = option(
        None,
        "folder for model.py, profile.json and plan.json",
        "DIR",
        flag="--output",
        parse=Path,
        told="the model's name; for a model file, its own",
    )

    def of_one_kind(self, gpu: str) -> "FitOptions":
        """Return the options for one kind of GPU; a schedule that was asked for stays so."""
        return self.changed(gpu=gpu)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(StageRules):
    """Which schedules are compared, and with how many microbatches."""

    schedules: Sequence[str] = option(
        (),
        "compare the best plans under these schedules, as in 1f1b,1f1b-flush,zb-h1",
        "NAME,NAME",
        parse=names,
    )
    microbatches: Sequence[int] = option(
        (),
        "each with these numbers of microbatches, as in 4,8,16; schedules are compared at equal "
        "global batch",
        "M,M",
        parse=microbatch_counts,
        least=1,
        told="4 per GPU",
    )
    time_limit_s: float | None = same(SolveOptions, "time_limit_s")
    progress: Progress | None = same(SolveOptions, "progress")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options):
    """What a report shows besides the plan."""

    profile: "Profile | str | Path | None" = option(
        None,
        "profile that the plan was made from, for the comparisons; of several kinds, as in "
        "a100=a.json,t4=b.json",
        "FILE",
        told="profile.json, if it is that one",
    )
    run: "Timeline | str | Path | None" = option(
        None,
        "a run of the plan, as a trace or a timeline, to compare with the simulation",
        "FILE",
        aliases=("--measured",),
    )
    minibatches: int | None = option(
        None,
        "simulate N minibatches",
        "N",
        told="enough for a steady state",
        advanced=True,
    )
    time_limit_s: float | None = same(SolveOptions, "time_limit_s", REPORT_S, told=f"{REPORT_S:g}s")
    progress: Progress | None = same(SolveOptions, "progress")


@dataclass(frozen=True, kw_only=True)
class QuickstartOptions(Options):
    """How large the tour is."""

    gpus: int | None = option(
        None, "workers", "N", least=1, told="the GPUs of this machine, or its cores, at most 8"
    )
    device: DeviceType | None = same(
        TrainArguments, "device", told="GPUs where PyTorch sees any, else CPUs"
    )
    backend: Backend | None = same(TrainArguments, "backend")
    steps: int = option(240, "train N minibatches", "N", least=1, aliases=("--max-steps",))
    show_progress: bool = option(False, "show a progress line of the workers on stderr", flag=None)
    on_phase: Callable[[str], None] = option(print, "is told what begins", flag=None)


@dataclass(frozen=True, kw_only=True)
class SelftestOptions(Options):
    """What is checked."""

    device: DeviceType | None = option(
        None, "what to check", "KIND", told="a GPU where PyTorch sees any, else cpu"
    )
    workers: int = option(
        2,
        "workers of the runs that have several; fewer GPUs than workers are shared, over gloo by "
        "default",
        "N",
        advanced=True,
    )
    backend: Backend | None = same(
        TrainArguments, "backend", told="nccl where each worker has a GPU, else gloo"
    )
    model: Sequence[str] = option(
        (),
        "also cut this model after every layer: a model file, or FILE:FUNCTION; may be repeated",
        "FILE",
        repeat=True,
        advanced=True,
    )
    only: Sequence[str] = option(
        (), "run these checks, by name, with commas between", "CHECK", parse=names, advanced=True
    )
    skip: Sequence[str] = option(
        (),
        "leave out these checks, by name, with commas between",
        "CHECK",
        parse=names,
        advanced=True,
    )
    on_row: Callable[[Any], None] | None = option(
        None, "is told each row as it is found", flag=None
    )
