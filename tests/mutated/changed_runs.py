"""Train from a plan, or go on from a checkpoint, that was changed by seed, and say what became of
it.

Right is one of two: a refusal, with a sentence and the exit code of wrong input; or a training that
is the same to the bit as without the change. A plan may be another one that is right, too: what it
says of the training itself, such as its number of microbatches, is then taken over into the
unchanged plan, and both must give the same bits.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.api.running import make_job
from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.folders import INDEX, INDEX_DIGEST
from planner.executor.run.train import train_worker
from planner.formats.plan import Plan, load_plan, save_plan
from planner.options.training import CheckpointOptions, TrainArguments
from planner.workers.job import Job
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.executor.processes import run_workers
from tests.mutated.mutations import mutated

STEPS, EVERY, SEED = 6, 3, 5
MICROBATCH_SIZE, MICROBATCHES = 2, 2
WORKERS = 2
LEFT_S = 20.0  # for the other worker, once one has refused the training

# What a plan decides of the training itself.
DECIDED = (
    "schedule",
    "microbatches",
    "microbatch_size",
    "autocast",
    "master_weights",
    "memory_format",
    "device",
)

Bits = tuple[tuple[float | None, ...], bytes]  # losses, and the file of the weights


@dataclass(frozen=True)
class Right:
    """The files that are changed, and what a training with them gives.

    Attributes:
        folder: with model.py, plan.json and checkpoints.
        bits: of the whole run.
    """

    folder: Path
    bits: Bits

    @property
    def model(self) -> Path:
        return self.folder / "model.py"

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / f"step-{EVERY:08}"


def make_right(folder: Path) -> Right:
    """Write a model, a plan and a checkpoint in the middle of a run, and train the run to
    its end.
    """
    path = write_model(folder, "language", "adamw").rename(folder / "model.py")
    plan = make_plan(structural_profile(path, MICROBATCH_SIZE), (1, 1), "1f1b-flush", MICROBATCHES)
    save_plan(plan, folder / "plan.json")
    checkpoints = CheckpointOptions(
        checkpoint_every=EVERY, checkpoint_folder=str(folder / "checkpoints"), keep=2
    )
    bits = bits_of(path, plan, folder / "whole", checkpoints)
    return Right(folder, bits)


def bits_of(
    model: Path, plan: Plan, folder: Path, checkpoints: CheckpointOptions | None = None
) -> Bits:
    """Train to the end; raise what the first worker refuses it with, and RuntimeError for a
    crash.
    """
    folder.mkdir()
    weights = folder / "weights.safetensors"
    saving = vars(checkpoints or CheckpointOptions())
    arguments = TrainArguments(steps=STEPS, seed=SEED, save_weights=weights, **saving)
    job = make_job(model, plan, arguments)
    path = folder / "job.json"
    path.write_text(job.model_dump_json(), encoding="utf-8")
    log = folder / "workers.log"
    log.touch()
    run_workers(_train, [str(path)], log, WORKERS, left_s=LEFT_S)

    refusals = sorted(folder.glob("refusal-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if refusals:
        refusal = json.loads(refusals[0].read_text("utf-8"))
        error = PlannerError(refusal["message"], hint=refusal["hint"])
        error.exit_code = refusal["exit_code"]
        raise error
    losses = folder / "losses.json"
    if not losses.exists():
        raise RuntimeError(log.read_text("utf-8"))
    return tuple(json.loads(losses.read_text("utf-8"))), weights.read_bytes()


def _train(paths: Sequence[str]) -> None:
    path = Path(paths[0])
    job = Job.model_validate_json(path.read_text("utf-8"))
    try:
        result = train_worker(job)
    except PlannerError as error:
        content = {"message": error.message, "hint": error.hint, "exit_code": error.exit_code}
        path.with_name(f"refusal-{os.environ['RANK']}.json").write_text(
            json.dumps(content), encoding="utf-8"
        )
        # as a worker of a launcher does: the other one may wait for it for ever
        os._exit(error.exit_code)
    if result is not None:
        losses = [loss.loss for loss in result.losses]
        path.with_name("losses.json").write_text(json.dumps(losses), encoding="utf-8")


def problem_with_plan(seed: int, right: Right, folder: Path) -> str | None:
    """Change the plan by the seed, and train by it; say what is wrong with what comes of it, or
    None.
    """
    folder.mkdir()
    path = folder / "plan.json"
    text = (right.folder / "plan.json").read_text("utf-8")
    path.write_text(mutated(text, random.Random(seed)), encoding="utf-8", errors="replace")

    def train() -> str | None:
        plan = load_plan(path)
        if plan.workers != WORKERS:
            make_job(right.model, plan, TrainArguments(steps=STEPS))
            return None
        bits = bits_of(right.model, plan, folder / "run")
        expected = right.bits
        usual = load_plan(right.folder / "plan.json")
        same_question = usual.model_copy(update={name: getattr(plan, name) for name in DECIDED})
        if same_question != usual:
            expected = bits_of(right.model, same_question, folder / "expected")
        return None if bits == expected else f"other bits: losses {bits[0]}, not {expected[0]}"

    return _problem(f"plan of seed {seed}", train)


def problem_with_checkpoint(seed: int, right: Right, folder: Path) -> str | None:
    """Change the checkpoint by the seed, and go on from it; say what is wrong with what comes of
    it, or None.
    """
    folder.mkdir()
    generator = random.Random(seed)
    checkpoint = folder / right.checkpoint.name
    shutil.copytree(right.checkpoint, checkpoint)
    change = generator.choice(CHANGES)
    change(checkpoint, generator)

    def train() -> str | None:
        plan = load_plan(right.folder / "plan.json")
        bits = bits_of(right.model, plan, folder / "run", CheckpointOptions(resume=str(checkpoint)))
        # The run's losses are those from the checkpoint on.
        same = bits == (right.bits[0][EVERY:], right.bits[1])
        return None if same else f"other bits: losses {bits[0]}, not {right.bits[0][EVERY:]}"

    return _problem(f"checkpoint of seed {seed}, {change.__name__}", train)


def _problem(name: str, train: Callable[[], str | None]) -> str | None:
    try:
        problem = train()
    except PlannerError as error:
        if error.exit_code != InputError.exit_code:
            return f"{name}: exit code {error.exit_code}: {error}"
        if not error.message or "\n" in error.message or not error.hint:
            return f"{name}: no sentence with a hint: {error}"
        return None
    except Exception:
        return f"{name}: {traceback.format_exc()[-1500:]}"
    return None if problem is None else f"{name}: {problem}"


def _file(checkpoint: Path, generator: random.Random) -> Path:
    return generator.choice(sorted(checkpoint.iterdir()))


def flip_a_bit(checkpoint: Path, generator: random.Random) -> None:
    path = _file(checkpoint, generator)
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    path.write_bytes(content)


def cut_a_file(checkpoint: Path, generator: random.Random) -> None:
    path = _file(checkpoint, generator)
    content = path.read_bytes()
    path.write_bytes(content[: generator.randrange(len(content))])


def lengthen_a_file(checkpoint: Path, generator: random.Random) -> None:
    with _file(checkpoint, generator).open("ab") as file:
        file.write(generator.randbytes(generator.randrange(1, 100)))


def remove_a_file(checkpoint: Path, generator: random.Random) -> None:
    _file(checkpoint, generator).unlink()


def exchange_files(checkpoint: Path, generator: random.Random) -> None:
    one, other = generator.sample(sorted(checkpoint.iterdir()), 2)
    spare = checkpoint / "spare"
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


def put_a_folder_there(checkpoint: Path, generator: random.Random) -> None:
    path = _file(checkpoint, generator)
    path.unlink()
    path.mkdir()


def add_a_file(checkpoint: Path, generator: random.Random) -> None:
    """Which changes nothing."""
    (checkpoint / "note.txt").write_bytes(generator.randbytes(20))


def rename_the_folder(checkpoint: Path, generator: random.Random) -> None:
    """Into one of another minibatch, in whose place nothing is then."""
    checkpoint.rename(checkpoint.with_name(f"step-{generator.randrange(4, 100):08}"))


def change_the_index(checkpoint: Path, generator: random.Random) -> None:
    index = checkpoint / INDEX
    index.write_text(
        mutated(index.read_text("utf-8"), generator), encoding="utf-8", errors="replace"
    )


def call_the_index_old(checkpoint: Path, generator: random.Random) -> None:
    """Version 1, which had no checksum, with another change."""
    index = checkpoint / INDEX
    content = json.loads(index.read_text("utf-8"))
    content["schema_version"] = 1
    content["minibatch"] = generator.randrange(100)
    index.write_text(json.dumps(content), encoding="utf-8")
    if generator.random() < 0.5:
        (checkpoint / INDEX_DIGEST).unlink()


CHANGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flip_a_bit,
    flip_a_bit,
    flip_a_bit,
    cut_a_file,
    lengthen_a_file,
    remove_a_file,
    exchange_files,
    put_a_folder_there,
    add_a_file,
    rename_the_folder,
    change_the_index,
    change_the_index,
    change_the_index,
    call_the_index_old,
)
