"""Train models that nothing here was written for in pipelines and in one plain process, and
compare.

python -m benchmarks.new_models [MODEL ...] [--save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from tabulate import tabulate

from benchmarks.kept import Results
from benchmarks.new_models.one_process import (
    Trained,
    initial_weights,
    largest_difference,
    one_process,
    tensors,
)
from planner.api.running import profile, train
from planner.formats.files import write_text
from planner.formats.plan import Plan
from planner.formats.profile import Profile
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import CheckpointOptions, RunOptions
from planner.schedule.registry import find
from planner.selfcheck.lab import even_plan
from planner.selfcheck.training import train_alone

HERE = Path(__file__).parent
# of the models that name none of their own
PACKAGES = ("transformers", "timm", "diffusers", "peft")
BATCH_SIZE, MICROBATCHES, STEPS, HALF, SEED = 4, 4, 6, 3, 0
PATIENT = RunOptions(hang_timeout_s=600)  # others may use the cores


@dataclass(frozen=True)
class Case:
    """How a model is trained: a plan for the first half of its minibatches, and another to resume
    under.

    Attributes:
        normalises: over the samples of a microbatch, so that one process divides minibatches, too.
        random: it has dropout, whose random numbers are drawn per microbatch; one worker stands for
            one process.
        tied: stages share weights, for which weight stashing is refused.
        packages: what the model needs beside planner, by the names of their modules.
        microbatches: 1 where the loss compares the samples of a minibatch, which must not be
            divided then.
    """

    second: str
    replicas: tuple[int, ...]
    first: str = "1f1b-flush"
    normalises: bool = False
    random: bool = False
    tied: bool = False
    packages: tuple[str, ...] = PACKAGES
    microbatches: int = MICROBATCHES


CASES = {
    "qwen3": Case("zb-h1", (2, 1)),
    "olmoe": Case("gpipe", (1, 1, 1)),
    "bart": Case("interleaved", (1, 1), tied=True),
    "vit_mae": Case("zb-v", (1, 1)),
    "swin": Case("zb-h1", (1, 2)),
    "efficientnet": Case("1f1b-flush", (1, 1, 1), first="gpipe", normalises=True),
    "mamba": Case("1f1b-flush", (2, 1), tied=True),
    "wav2vec2": Case("zb-h1", (1, 2)),
    "vae": Case("gpipe", (2, 1)),
    "dit": Case("zb-h1", (1, 1, 1), random=True),  # it drops classes at random
    "dora_phi3": Case("1f1b-flush", (1, 2)),
    "graph_network": Case("interleaved", (1, 1)),
    "actor_critic": Case("zb-h1", (2, 1)),
    "checkpointed": Case("gpipe", (1, 1, 1), normalises=True, random=True),
    "falcon": Case("zb-v", (1, 1)),
    "deberta": Case("1f1b-flush", (1, 1, 1), first="zb-h1"),
    "segformer": Case("gpipe", (1, 1, 1), normalises=True),
    "patch_tst": Case("interleaved", (1, 1), first="gpipe"),
    "convnext_v2": Case("zb-h1", (1, 2)),
    "mixer": Case("1f1b-flush", (2, 1), first="zb-v"),
    "flux": Case("zb-h1", (1, 1, 1)),
    "ia3_opt": Case("1f1b-flush", (1, 2), tied=True),
    "perceiver": Case("gpipe", (1, 1, 1), tied=True),
    "vq_vae": Case("zb-h1", (2, 1)),
    "ranking": Case("interleaved", (1, 1)),
    "spiking": Case("zb-h1", (1, 1, 1), packages=("snntorch",)),
    "neural_ode": Case("gpipe", (1, 1, 1), packages=("torchdiffeq",), normalises=True),
    "real_nvp": Case("zb-h1", (2, 1), packages=("normflows",)),
    "spline_flow": Case("interleaved", (1, 1), packages=("nflows",)),
    "fourier_operator": Case("zb-h1", (1, 2), packages=("neuralop",)),
    "kan_network": Case("1f1b-flush", (1, 1, 1), packages=("kan",)),
    "equivariant": Case("zb-v", (1, 1), packages=("e3nn",)),
    "deep_kernel": Case("gpipe", (2, 1), packages=("gpytorch",)),
    "metric_learning": Case(
        "gpipe", (1, 1, 1), packages=("pytorch_metric_learning",), microbatches=1
    ),
    "tabnet": Case("zb-h1", (1, 1), packages=("pytorch_tabnet",), normalises=True),
    "deepfm": Case("zb-h1", (1, 2), packages=("deepctr_torch",)),
    "conformer_ctc": Case("zb-h1", (1, 1, 1), packages=("conformer",), normalises=True),
    "graph_transformer": Case("interleaved", (1, 1), packages=("torch_geometric",)),
    "memory_tokens": Case("zb-v", (1, 1), packages=("x_transformers",)),
    "clip_pair": Case("zb-h1", (1, 1, 1), packages=("open_clip",), microbatches=1),
    "unet_plus_plus": Case(
        "gpipe",
        (1, 1, 1),
        packages=("segmentation_models_pytorch",),
        normalises=True,
        microbatches=1,
    ),
    "performer": Case("zb-h1", (1, 1, 1), packages=("performer_pytorch",)),
    "mamba_scan": Case("1f1b-flush", (1, 2), packages=("mambapy",)),
    "sparse_attention": Case("zb-h1", (2, 1), packages=("entmax",)),
    "inverted": Case("interleaved", (1, 1), packages=("iTransformer",)),
    "unetr": Case("zb-h1", (1, 1, 1), packages=("monai",)),
    "registration": Case("gpipe", (1, 2), packages=("kornia",)),
    "perceptual": Case("zb-h1", (1, 1, 1), packages=("lpips",), random=True),
    "max_vit": Case("1f1b-flush", (1, 1, 1), packages=("vit_pytorch",), normalises=True),
    "detector": Case("gpipe", (1, 1, 1), packages=("transformers",)),
    "reformer": Case("zb-h1", (1, 1, 1), packages=("transformers",), random=True),
    "mixture_density": Case("zb-h1", (2, 1), packages=()),
}


@dataclass(frozen=True)
class Row:
    """The largest absolute differences of a run from one process.

    `moved` is the largest change of a weight in training: a difference of weights is to be seen
    beside it.
    """

    model: str
    loss_mean: str
    parameters: int
    run: str
    loss_difference: float
    weight_difference: float
    moved: float


def main() -> None:
    """Train each model, print the table, and save it if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--save", action="store_true", help="write results.json and results.md")
    args = parser.parse_args()
    results = Results(HERE, save=args.save)
    for model in args.models:
        missing = [package for package in CASES[model].packages if find_spec(package) is None]
        if missing:
            print(
                f"{model} is left out: {', '.join(missing)} is not installed; see README.md",
                file=sys.stderr,
            )
            continue
        for row in rows(model):
            print(row, flush=True)
            results.add("models", f"{model}, {row.run}", row)
        if args.save:
            write_text(HERE / "results.md", f"{results.about('models')}.\n\n{table(results)}\n")
    print(table(results))


def rows(model: str) -> list[Row]:
    """Train a model in two halves under two synchronous plans, and once under weight stashing."""
    case, spec = CASES[model], load_model_file(str(HERE / "models" / f"{model}.py"))
    profiled = profile(spec, batch_size=BATCH_SIZE, seconds=0.2)
    plans = [
        even_plan(profiled, find(schedule), replicas, microbatches=case.microbatches)
        for schedule, replicas in ((case.first, (1, 1)), (case.second, case.replicas))
    ]
    if case.random:
        alone = even_plan(profiled, find("gpipe"), (1,), microbatches=MICROBATCHES)
        expected = in_pipeline(spec, [alone])
    else:
        expected = one_process(spec, plans[0], SEED, STEPS, divided=case.normalises)
    about = model, profiled
    found = [_row(*about, spec, plans, expected)]
    if not case.tied and not case.random:
        plan = even_plan(profiled, find("1f1b"), (1, 1), microbatches=1)
        found.append(_row(*about, spec, [plan], stashed(spec, profiled, plan)))
    return found


def in_pipeline(spec: TrainingSpec, plans: Sequence[Plan]) -> Trained:
    """Train in workers; with two plans, stop after half of the minibatches and resume under the
    second.
    """
    with tempfile.TemporaryDirectory() as folder:
        weights, losses, resume = Path(folder) / "weights.safetensors", [], None
        for plan, steps in zip(plans, (HALF, STEPS)[-len(plans) :], strict=True):
            # A checkpoint drains the pipeline, after which weight stashing begins anew.
            every, seed = HALF if len(plans) > 1 else None, None if resume else SEED
            checkpoints = CheckpointOptions(
                folder=f"{folder}/checkpoints", every=every, resume=resume
            )
            result = train(
                str(spec.path),
                plan,
                steps=steps,
                seed=seed,
                checkpoints=checkpoints,
                save_weights=weights,
                run_options=PATIENT,
            )
            losses += [each.loss or float("nan") for each in result.losses]
            resume = "auto"
        return Trained(losses, load_file(weights))


def stashed(spec: TrainingSpec, profiled: Profile, plan: Plan) -> Trained:
    """Train in this process at the weight versions of PipeDream's formula."""
    losses, trained = train_alone(spec, profiled, plan, SEED, torch.device("cpu"), STEPS)
    return Trained(losses, tensors(trained))


def table(results: Results) -> str:
    """Format all rows that are known."""
    rows = results.records("models", Row).values()
    ordered = sorted(rows, key=lambda row: [*CASES].index(row.model))
    return tabulate(
        [
            [
                row.model,
                f"{row.parameters:,}",
                row.loss_mean,
                row.run,
                f"{row.loss_difference:.1e}",
                f"{row.weight_difference:.1e}",
                f"{row.moved:.1e}",
            ]
            for row in ordered
        ],
        [
            "model",
            "parameters",
            "loss is a mean over",
            "run",
            "losses differ",
            "weights differ",
            "weights moved",
        ],
        tablefmt="github",
        disable_numparse=True,
    )


def _row(
    model: str, profiled: Profile, spec: TrainingSpec, plans: Sequence[Plan], expected: Trained
) -> Row:
    trained = in_pipeline(spec, plans)
    losses, weights = trained.differences(expected)
    before = initial_weights(spec, SEED)
    mean = profiled.loss
    return Row(
        model,
        "not known"
        if mean is None
        else mean.over + ("" if mean.ignored is None else f" but {mean.ignored}"),
        sum(tensor.numel() for tensor in before.values()),
        ", then ".join(f"{plan.schedule} {plan.config}" for plan in plans),
        losses,
        weights,
        largest_difference(before, trained.weights),
    )


if __name__ == "__main__":
    main()
