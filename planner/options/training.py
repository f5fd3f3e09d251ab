"""How to train, which checkpoints to write, and how to watch the run: the options of `train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.formats.names import Backend, DeviceType
from planner.options.numbers import host_range
from planner.options.option import Options, option, same

BaselineName = Literal["data-parallel"]
STEPS = 100  # where the model file has no dataset(), and so no epoch to go by


@dataclass(frozen=True, kw_only=True)
class StepOptions(Options):
    """How a plan is trained whose samples somebody else reads."""

    scale_lr: bool = option(
        False,
        "multiply each stage's learning rate by the number of minibatches that its update averages",
        advanced=True,
    )
    accept_divided_loss: bool = option(
        False,
        "train on the mean of the microbatches' losses even if the loss is not a mean over "
        "samples, such as a contrastive one",
        told="refuse to split its minibatches, unless the plan was solved with this option",
        advanced=True,
    )
    late_lr: float = option(
        0.0,
        "divide each stage's learning rate by 1 + K for every update that its gradients are stale",
        "K",
        positive=True,
        advanced=True,
        told="equal rates; 0.3 has helped short trainings of eight stages",
    )
    clip_grad_norm: float | None = option(
        None,
        "scale gradients down to norm X, of the model, or under 1f1b and 2bw of a stage",
        "X",
        positive=True,
    )
    deterministic: bool = option(
        False,
        "use only algorithms that give the same bits in every run, or end the run",
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(StepOptions):
    """How to train; plan and model file say the rest."""

    drop_last: bool = option(
        False, "skip the last minibatch of an epoch if it is smaller", advanced=True
    )
    evaluate_every: int | None = option(
        None,
        "evaluate on evaluation_dataset() after every N minibatches and at the end",
        "N",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """Which checkpoints to write, and which to resume from."""

    checkpoint_every: int | None = option(
        None,
        "drain the pipeline and write a checkpoint after every N minibatches and at the end",
        "N",
        least=1,
    )
    checkpoint_folder: str = option(
        "checkpoints",
        "folder of the checkpoints, which all hosts share",
        "DIR",
        advanced=True,
    )
    keep: int = option(3, "keep only the last K checkpoints", "K", least=1, advanced=True)
    resume: str | None = option(
        None,
        "continue from the checkpoint PATH, or from the newest in the folder PATH, whatever plan "
        "wrote it; without PATH, or with 'auto', from the newest in `checkpoint_folder`, if there "
        "is one. `steps` and `epochs` count from the first run",
        "PATH",
        const="auto",
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """How to supervise a run; nothing here changes what is trained."""

    hang_timeout_s: float = option(
        120.0,
        "end the run when a worker makes no progress for SECONDS longer than the slowest "
        "instruction took",
        "SECONDS",
        flag="--hang-timeout",
        positive=True,
        advanced=True,
    )
    interface: str | None = option(
        None,
        "network interface to listen on, such as eth0",
        "NAME",
        told="loopback on one host; under torchrun what GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
        "say, or the one that "
        "leads to worker 0",
        advanced=True,
    )
    trace: str | None = option(
        None, "write what every worker did as a Chrome trace, which Perfetto opens", "FILE"
    )
    trace_minibatches: int = option(
        100, "trace the last N minibatches", "N", least=1, advanced=True
    )
    stop_on_nan: bool = option(
        False,
        "end the run when the loss of a minibatch is NaN or infinite",
        told="report it in the result",
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class DriftOptions(Options):
    """How to see whether devices and links are what the plan was solved for, while training."""

    drift_window: int = option(
        50,
        "compare computations and messages with the plan after every N minibatches, and say where "
        "they differ for long; 0: never",
        "N",
        least=0,
        advanced=True,
    )
    profile: str | None = option(
        None,
        "profile that the plan was solved from, to say what another plan would give",
        "FILE",
        told="profile.json next to the plan, if that is the one",
        advanced=True,
    )

    replan: bool = option(
        False,
        "move to a faster plan while training, where devices or links are not as planned; "
        "asynchronous schedules drain the pipeline for it",
    )
    replan_gain: float = option(
        2.0,
        "with `replan`, move where what is left of the run becomes shorter by X times the seconds "
        "that a move takes",
        "X",
        positive=True,
        advanced=True,
    )


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(Options):
    """How a run goes on without hosts that are lost; the same command, with `elastic`, is started
    on every host.
    """

    elastic: tuple[int, int] | str | None = option(
        None,
        "train on MIN to MAX hosts: continue when hosts are lost or join, under the plans made by "
        "`survive` of `plan solve`",
        "MIN:MAX",
        parse=host_range,
        advanced=True,
    )
    rendezvous: str | None = option(
        None,
        "address of the store where hosts meet, opened by the host that has it",
        "HOST:PORT",
        aliases=("--rdzv-endpoint",),
        advanced=True,
    )
    secret_file: str | None = option(
        None,
        "file with the secret that the hosts of a run share, written by the first; or set "
        "PLAN_SECRET on all hosts",
        "FILE",
        told="a file in ~/.planner, for hosts that share the home folder",
        advanced=True,
    )
    copy_every: int = option(
        50,
        "with `elastic`, drain the pipeline and copy the state to other hosts after every N "
        "minibatches",
        "N",
        least=1,
        advanced=True,
    )
    copy_folder: str = option(
        "/dev/shm",
        "folder of the copies, in the memory of each host",
        "DIR",
        advanced=True,
    )

    @property
    def hosts(self) -> tuple[int, int]:
        """The fewest and the most hosts."""
        assert isinstance(self.elastic, tuple)
        return self.elastic


@dataclass(frozen=True, kw_only=True)
class LoopOptions(StepOptions):
    """What a pipeline for a loop of one's own takes beside the plan and the model."""

    seed: int = option(0, "seed of the initial weights of a model file, and of dropout")
    device: DeviceType | None = option(
        None,
        "compute on cpu, cuda or another kind as PyTorch calls it",
        told="the kind that the plan was made for",
    )
    backend: Backend | None = option(
        None,
        "of messages: nccl, with a GPU for each worker, or gloo",
        told="what suits the device",
    )
    evaluates: bool = option(
        False,
        "whether the script calls evaluate(), for which stages are captured in evaluation mode, "
        "too",
    )
    hang_timeout_s: float = option(
        120.0,
        "seconds after which the run ends when a rank makes no progress in a call of the pipeline, "
        "or does not make a call that others wait in; it is no hang when all ranks run the "
        "script's own code",
        positive=True,
    )
    drift_window: int = same(DriftOptions, "drift_window")
    profile: str | None = same(
        DriftOptions,
        "profile",
        help="file of the profile that the plan was solved from, which lets `Pipeline.drift` say "
        "what another plan would give",
        told="none",
    )


@dataclass(frozen=True, kw_only=True)
class TrainArguments(TrainingOptions, CheckpointOptions, RunOptions, DriftOptions):
    """What `train` takes beside the model and its plan."""

    steps: int | None = option(None, "train N minibatches", "N", least=1, aliases=("--max-steps",))
    epochs: int | None = option(
        None,
        "train N passes over dataset()",
        "N",
        least=1,
        told=f"1, or {STEPS} minibatches without dataset()",
    )
    seed: int | None = option(
        None, "seed of weights, data order and dropout", told="0, or that of the checkpoint"
    )
    device: DeviceType | None = option(
        None,
        "compute on cpu, cuda (which includes ROCm), xpu or another device of PyTorch; only cpu, "
        "and cuda on one GPU, have been tried",
        "KIND",
        told="the kind that the plan was made for",
    )
    backend: Backend | None = option(
        None,
        "send messages with NCCL, which needs a GPU for each worker, or with gloo, which does not",
        told="nccl with `device=cuda`, xccl with xpu, gloo with cpu",
        advanced=True,
    )
    baseline: BaselineName | None = option(
        None,
        "train the whole model with DistributedDataParallel on the same number of workers, for "
        "comparison",
    )
    save_weights: str | Path | None = option(
        None,
        "write the trained weights of the whole model: a .safetensors file, or one for "
        "torch.load, for which worker 0 must hold them all",
        "FILE",
    )
    defer_weights: bool | None = option(
        None,
        "each worker builds only the weights of its own stages",
        negation="--no-defer-weights",
        advanced=True,
        told="only its own where the host has no room for a whole model per worker",
    )
    show_progress: bool = option(False, "show a progress line of the workers on stderr", flag=None)
