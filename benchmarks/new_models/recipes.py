"""Train public models by the recipes that people use for them, and compare with a plain loop.

python -m benchmarks.new_models.recipes [MODEL ...] [--save] [--again] [--time-limit SECONDS]

Every model runs in a process of its own, through the commands that a user types. A run that was
interrupted goes on where it stopped: what was measured of the same source is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from tabulate import tabulate
from torch import Tensor

from benchmarks.kept import ROOT, Results
from benchmarks.new_models.plain_loop import Finished, Recipe, train_plainly
from planner.formats.files import write_text

HERE = Path(__file__).parent
MICROBATCH, MICROBATCHES, STEPS, SEED = 4, 4, 8, 0  # 8 minibatches are two epochs of 52 samples
SHAPES = {"two stages": ("--stages", "2"), "two replicas": ("--stages", "1", "--replicas", "2")}
NOISE = 1e-7  # of the first weights of a second plain loop, whose difference is that of rounding
# differences that are rounding: at most this, or so many times those of noise
ROUNDING, FACTOR = 1e-4, 10

# BatchNorm's, which are those of the first replica's microbatches: `plan profile` and `plan train`
# say so in a line.
STATISTICS = ("running_mean", "running_var")

Outcome = Literal["equal", "equal but statistics", "differs", "refused", "failed", "timed out"]


@dataclass(frozen=True)
class Case:
    """A model of a package, and how people train it.

    Attributes:
        package: the module that it needs, and that pip installs.
        recipe: the optimizer and the schedule of the file, in words.
        traits: what makes it hard, in words.
        microbatches: 1 where the loss is of the whole batch.
        divided: the plain loop divides minibatches, too: for BatchNorm, and for what `collate`
            draws.
        ignored: the label that the loss does not count, if the plain loop weighs parts by labels.
    """

    package: str
    recipe: str
    traits: str = ""
    microbatches: int = MICROBATCHES
    divided: bool = False
    ignored: int | None = None


CASES = {
    "albert": Case(
        "transformers", "LAMB, linear after warm-up", "layers that share weights; padded"
    ),
    "roberta_mlm": Case(
        "transformers",
        "AdamW without decay of norms, linear after warm-up",
        "masks drawn by collate (torch); padded; tied embeddings",
        divided=True,
        ignored=-100,
    ),
    "whisper": Case("transformers", "AdamW, linear after warm-up", "padded labels"),
    "llava": Case(
        "transformers",
        "AdamW, cosine after warm-up",
        "frozen tower in eval mode; answers alone count",
    ),
    "modern_bert": Case(
        "transformers", "StableAdamW, trapezoid", "padded, masked words alone count"
    ),
    "electra": Case(
        "transformers",
        "AdamW, rates fall by layer, linear after warm-up",
        "words replaced by NumPy in __getitem__",
    ),
    "decision_transformer": Case(
        "transformers", "AdamW, warm-up", "the loss indexes by a mask of the target"
    ),
    "zamba2": Case("transformers", "AdamW, cosine after warm-up", "a block that is shared; padded"),
    "control_net": Case(
        "diffusers",
        "AdamW, constant after warm-up",
        "frozen UNet in eval mode; noise drawn by collate (torch)",
        divided=True,
    ),
    "ddpm": Case("diffusers", "AdamW, cosine after warm-up", "noise drawn in __getitem__ (torch)"),
    "deepseek_v3": Case(
        "pytorch_optimizer", "Muon and AdamW, trapezoid", "experts (transformers); padded"
    ),
    "series_transformer": Case(
        "transformers", "AdamW, cosine after warm-up", "a loss over observed values, in the model"
    ),
    "video_mae": Case(
        "transformers", "AdamW, cosine after warm-up", "indexes by a mask, in blocks"
    ),
    "sentence_pairs": Case(
        "sentence_transformers",
        "AdamW, linear after warm-up",
        "one network for both inputs; padded",
    ),
    "cait": Case(
        "timm",
        "LAMB with a norm of all weights, cosine after warm-up",
        "images mixed by collate (NumPy)",
        divided=True,
    ),
    "hiera": Case("timm", "Lion, rates fall by layer, OneCycleLR with a list", ""),
    "densenet_cifar": Case(
        "pytorchcv",
        "SGD with Nesterov's momentum, MultiStepLR",
        "images shifted in __getitem__ (random); BatchNorm",
        divided=True,
    ),
    "seg_res_net": Case(
        "monai",
        "Novograd, MONAI's cosine after warm-up",
        "slices augmented by transforms with a generator of their own",
    ),
    "swin_unetr": Case("monai", "AdamW, MONAI's cosine after warm-up", "Dice and cross entropy"),
    "feature_pyramid": Case(
        "segmentation_models_pytorch",
        "SGD with momentum, OneCycleLR",
        "focal loss with ignore_index 255; BatchNorm",
        divided=True,
        ignored=255,
    ),
    "distilled": Case(
        "vit_pytorch",
        "AdamW, CosineAnnealingLR",
        "frozen teacher in eval mode under no_grad; the loss in the model",
    ),
    "translator": Case(
        "x_transformers", "Adam, linear after warm-up", "the loss in the model; padded"
    ),
    "megabyte": Case(
        "MEGABYTE_pytorch", "Adam, cosine after warm-up", "the loss in the model, which ignores 0"
    ),
    "xlstm_text": Case(
        "xlstm", "AdamW, cosine after warm-up", "a loop over words, in blocks; padded"
    ),
    "crf_tagger": Case(
        "torchcrf", "SGD with momentum, ExponentialLR", "a loss over tokens, in blocks; padded"
    ),
    "liquid": Case("ncps", "Adam, ExponentialLR", "loops over time; masked weights"),
    "residual_vq": Case(
        "vector_quantize_pytorch",
        "AdamW, cosine after warm-up",
        "codebooks change in forward, in blocks: whole minibatches",
        microbatches=1,
    ),
    "molecule": Case("egnn_pytorch", "Adam, CosineAnnealingLR", "masked atoms"),
    "diff_pool": Case("torch_geometric", "Adam, StepLR", "losses of whole batches", microbatches=1),
    "ft_transformer": Case(
        "rtdl_revisiting_models", "AdamW, groups by name, no schedule", "tables"
    ),
    "tab_m": Case("tabm", "AdamW, no schedule", "an ensemble; tables"),
    "speaker": Case(
        "speechbrain", "Adam, CyclicLR", "a margin between classes; BatchNorm", divided=True
    ),
}


@dataclass(frozen=True)
class Row:
    """One training, compared with the plain loop; numbers are None where it did not end."""

    model: str
    shape: str
    outcome: Outcome
    source: str  # a digest of what was run
    layers: int | None = None
    loss_mean: str = ""
    first_loss: float | None = None
    last_loss: float | None = None
    plain_last_loss: float | None = None
    loss_difference: float | None = None  # the largest, relative
    weight_difference: float | None = None  # of all weights, relative to what training changed
    statistics_difference: float | None = None  # of BatchNorm's running statistics, likewise
    noise_difference: float | None = None  # of the weights of two plain loops, the second disturbed
    worst_difference: float | None = None  # of the tensor that differs most, relative to it
    worst_tensor: str = ""
    message: str = ""


class CommandError(Exception):
    """A command that ended with an error."""

    def __init__(self, verb: str, code: int, message: str) -> None:
        super().__init__(f"{verb}: {message}")
        self.code = code


def main() -> None:
    """Train the models, print a line for each training, and save the table if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--save", action="store_true", help="write results.json and recipes.md")
    parser.add_argument(
        "--again", action="store_true", help="also what was measured of this source"
    )
    parser.add_argument("--time-limit", type=float, default=600, help="seconds for each model")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.child:
        _write_rows(args.models[0], args.shapes, args.child)
        return

    results = Results(HERE, save=args.save)
    rows = results.records("recipes", Row).values()
    measured = {(row.model, row.shape, row.source) for row in rows}
    for model in args.models:
        if find_spec(CASES[model].package) is None:
            print(f"{model} is left out: {CASES[model].package} is not installed", file=sys.stderr)
            continue
        shapes = [
            shape
            for shape in args.shapes
            if args.again or (model, shape, source_of(model)) not in measured
        ]
        if not shapes:
            continue

        for row in measure(model, shapes, args.time_limit):
            print(described(row), flush=True)
            results.add("recipes", f"{model}, {row.shape}", row)
        if args.save:
            write_text(HERE / "recipes.md", f"{results.about('recipes')}.\n\n{table(results)}\n")


def measure(model: str, shapes: list[str], time_limit: float) -> list[Row]:
    """Run a model in a process of its own, and end that and its workers at the time limit."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            __spec__.name if __spec__ else "",
            model,
            "--child",
            folder,
        ]
        command += ["--shapes", *shapes]
        child = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            child.wait(time_limit)
            ending: Outcome = "failed"
        except subprocess.TimeoutExpired:
            ending = "timed out"
        finally:
            _end(child)

        kept = Path(folder) / "rows.json"
        rows = [Row(**row) for row in json.loads(kept.read_text())] if kept.exists() else []
        missing = [shape for shape in shapes if shape not in {row.shape for row in rows}]
        source = source_of(model)
        return rows + [Row(model, shape, ending, source) for shape in missing]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, which share its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _write_rows(model: str, shapes: list[str], folder: Path) -> None:
    """Train in the shapes, and write each row when it is there."""
    case = CASES[model]
    path = HERE / "models" / f"{model}.py"
    parts = case.microbatches if case.divided else 1
    recipe = Recipe(MICROBATCH * case.microbatches, parts, STEPS, SEED, case.ignored)

    plain = train_plainly(path, recipe)
    disturbed = train_plainly(path, recipe, noise=NOISE)
    noise = _of_training(disturbed.after, plain)
    rows = []
    for shape in shapes:
        try:
            rows.append(_trained(model, path, shape, folder, plain, noise))
        except CommandError as error:
            outcome: Outcome = "failed" if error.code == 1 else "refused"
            first, last = plain.losses[0], plain.losses[-1]
            about = f"plain: {first:.4f} to {last:.4f}. {error}"
            rows.append(Row(model, shape, outcome, source_of(model), message=about))
        write_text(folder / "rows.json", json.dumps([row.__dict__ for row in rows]))


def _trained(
    model: str,
    path: Path,
    shape: str,
    folder: Path,
    plain: Finished,
    noise: float,
) -> Row:
    """Profile once, price the shape, train it, and compare."""
    microbatches = CASES[model].microbatches
    weights = folder / "weights.safetensors"

    if not (folder / "profile.json").exists():
        plan(folder, "profile", path, "--batch-size", MICROBATCH, "--seconds", 0.1)
    schedule = ("--schedule", "1f1b-flush", "--microbatches", microbatches)
    plan(folder, "price", *SHAPES[shape], *schedule, "--gpus", 2, "--bandwidth", "10Gbps")
    how = ("--steps", STEPS, "--seed", SEED, "--hang-timeout", 300)
    result = plan(folder, "train", path, *how, "--save-weights", weights)

    losses = [each["loss"] for each in result["losses"]]
    pairs = zip(losses, plain.losses, strict=True)
    loss_difference = max(_relative(mine, its) for mine, its in pairs)
    trained = load_file(weights)
    worst, worst_tensor = _worst(trained, plain.after)
    weight_difference = _of_training(trained, plain)
    statistics_difference = _of_training(trained, plain, statistics=True)
    tolerance = max(ROUNDING, FACTOR * noise)
    outcome: Outcome = (
        "equal" if max(loss_difference, weight_difference) <= tolerance else "differs"
    )
    if outcome == "equal" and statistics_difference > tolerance:
        outcome = "equal but statistics"

    profile = json.loads((folder / "profile.json").read_text())
    mean = profile["loss"]
    return Row(
        model,
        shape,
        outcome,
        source_of(model),
        layers=len(profile["layers"]),
        loss_mean="not known" if mean is None else _mean(mean),
        first_loss=losses[0],
        last_loss=losses[-1],
        plain_last_loss=plain.losses[-1],
        loss_difference=loss_difference,
        weight_difference=weight_difference,
        statistics_difference=statistics_difference,
        noise_difference=noise,
        worst_difference=worst,
        worst_tensor=worst_tensor,
    )


def plan(folder: Path, verb: str, *flags: object) -> dict[str, Any]:
    """Run a command in the folder, and return its answer; raise CommandError with its message."""
    command = [sys.executable, "-m", "planner", verb, *map(str, flags), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    try:
        answer: dict[str, Any] = json.loads(ended.stdout)
    except json.JSONDecodeError as cause:
        text = (ended.stdout + ended.stderr).strip()[-1000:]
        raise CommandError(verb, 1, f"no JSON: {text}") from cause
    if ended.returncode:
        message = f"{answer.get('error')} (hint: {answer.get('hint')})"
        raise CommandError(verb, ended.returncode, message)
    return answer


def _relative(value: float | None, expected: float) -> float:
    if value is None:
        return float("inf")
    return abs(value - expected) / max(abs(expected), 1e-6)


def _numbers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights and statistics in double precision, without counters."""
    return {
        name: torch.view_as_real(value).double() if value.is_complex() else value.double()
        for name, value in state.items()
        if (value.is_floating_point() or value.is_complex()) and value.numel()
    }


def _of_training(trained: dict[str, Tensor], plain: Finished, *, statistics: bool = False) -> float:
    """Return the norm of the difference of all weights, or statistics, relative to what training
    changed.
    """
    after, before, mine = map(_numbers, (plain.after, plain.before, trained))
    names = [name for name in after if name.endswith(STATISTICS) == statistics]
    apart = sum(float((mine[name] - after[name]).square().sum()) for name in names)
    moved = sum(float((before[name] - after[name]).square().sum()) for name in names)
    return float((apart / max(moved, 1e-30)) ** 0.5)


def _worst(trained: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest relative difference of a tensor, and its name."""
    mine = _numbers(trained)
    return max(
        (float((mine[name] - value).norm() / value.norm().clamp(min=1e-12)), name)
        for name, value in _numbers(after).items()
    )


def _mean(mean: dict[str, Any]) -> str:
    ignored = "" if mean.get("ignored") is None else f" but {mean['ignored']}"
    return f"{mean['over']}{ignored}"


def source_of(model: str) -> str:
    """Return a digest of the product, of the model's file and of what it imports from here."""
    files = sorted((ROOT / "planner").rglob("*.py"))
    shared = [
        HERE / "models" / f"{name}.py"
        for name in (model, "made_up", "schedules", "without_torchvision")
    ]
    digest = hashlib.sha256(repr(CASES[model]).encode())
    for path in [*files, *shared, HERE / "plain_loop.py"]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def described(row: Row) -> str:
    """Return a line about a training."""
    now = time.strftime("%H:%M:%S")
    text = f"{now} {row.model}, {row.shape}: {row.outcome}"
    if row.first_loss is not None:
        text += (
            f", loss {row.first_loss:.5f} to {row.last_loss:.5f} (plain {row.plain_last_loss:.5f})"
        )
        text += f", losses {row.loss_difference:.1e}, weights {row.weight_difference:.1e}"
        text += f" (noise {row.noise_difference:.1e})"
        text += f", worst {row.worst_difference:.1e} of {row.worst_tensor}"
        text += f"; mean over {row.loss_mean}; {row.layers} layers"
    return f"{text} {row.message}".rstrip()


def table(results: Results) -> str:
    """Format all rows that are known."""
    rows = results.records("recipes", Row).values()
    known = [row for row in rows if row.model in CASES]
    ordered = sorted(known, key=lambda row: [*CASES].index(row.model))
    heads = ["model", "package", "optimizer, schedule", "shape", "result", "loss is a mean over"]
    heads += ["first loss", "last loss", "losses differ", "weights differ", "by noise"]
    return tabulate(
        [_cells(row) for row in ordered], heads, tablefmt="github", disable_numparse=True
    )


def _cells(row: Row) -> list[str]:
    case = CASES[row.model]
    losses = [row.first_loss, row.last_loss]
    differences = [row.loss_difference, row.weight_difference, row.noise_difference]
    return [
        row.model,
        case.package,
        case.recipe,
        row.shape,
        row.outcome,
        row.loss_mean,
        *("" if value is None else f"{value:.4f}" for value in losses),
        *("" if value is None else f"{value:.1e}" for value in differences),
    ]


if __name__ == "__main__":
    main()
