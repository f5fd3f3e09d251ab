"""Checkpoints without processes: any cut reads what any other wrote, and none is ever half
there.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.optim import Optimizer
from typing_extensions import Unpack

import planner
from planner.errors import InputError, PlannerError
from planner.executor.checkpoint.checkpointer import Checkpointer, DataPosition, position
from planner.executor.checkpoint.folder_lock import LOCK
from planner.executor.checkpoint.folders import (
    INDEX,
    INDEX_DIGEST,
    Checkpoint,
    SavedCheckpoint,
    complete,
    find,
    load_checkpoint,
    resolve,
    save_index,
)
from planner.executor.checkpoint.optimizer_state import take_state
from planner.executor.checkpoint.stage_parts import (
    Restorable,
    content_of,
    fill_optimizer,
    restore_stage,
    write_part,
)
from planner.executor.checkpoint.tensor_file import write_tensors
from planner.executor.communication.sharding import Sharding
from planner.executor.observe.run_log import FILE, RunLog
from planner.formats.files import replace
from planner.model.capture.capture import capture_file
from planner.model.capture.graph import LayerGraph
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.stage import build_stage
from planner.options.training import CheckpointOptions
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

# A parameter that the first and the last layer share, buffers that training changes, and one that
# it does not.
TIED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)) for _ in range(4))
        )
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)) * self.scale)

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 11, (batch_size, 5))
    return (tokens,), tokens

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)
"""


def write_tied(folder: Path) -> Path:
    path = folder / "tied.py"
    path.write_text(TIED, encoding="utf-8")
    return path


class Split:
    """A model cut somewhere, with an optimizer for each stage; a graph for each replica, whose
    stages share weights.

    Replicas have an optimizer each, of which the first one's steps; or they divide it.
    """

    def __init__(
        self,
        spec: TrainingSpec,
        graphs: Sequence[LayerGraph],
        cuts: list[int],
        divides: bool = False,
    ) -> None:
        self.graph, self.divides = graphs[0], divides
        bounds = [0, *cuts, len(self.graph.layers)]
        self.stages: list[Restorable] = []
        for replica, graph in enumerate(graphs):
            for stage, (start, end) in enumerate(pairwise(bounds)):
                module = build_stage(graph, [layer.name for layer in graph.layers[start:end]])
                trained = [
                    parameter for parameter in module.parameters() if parameter.requires_grad
                ]
                optimizer = spec.optimizer(trained) if trained else None
                self.stages.append(Restorable(stage, replica, module, optimizer))
                if divides and optimizer is not None:
                    sharding = Sharding(trained, (replica, len(graphs)), (), torch.device("cpu"))
                    sharding.divide(optimizer)
                    self.stages[-1].sharding = sharding

    def scramble(self) -> None:
        """Nothing of what was there may be left."""
        with torch.no_grad():
            for own in self.stages:
                for tensor in own.module.state_dict().values():
                    tensor.copy_(torch.randint(50, 99, tensor.shape))

    def train(self) -> None:
        """Change everything that training changes."""
        gradients: dict[str, Tensor] = {}
        for own in sorted(self.stages, key=lambda own: own.stage):
            for name, parameter in own.module.named_parameters():
                parameter.grad = gradients.setdefault(name, torch.randn_like(parameter)).clone()
            if own.optimizer is not None and own.sharding is not None:
                own.sharding.take_gradients()
                own.optimizer.step()
                self._hand_on(own, own.sharding)
            elif own.optimizer is not None and own.replica == 0:
                own.optimizer.step()
            with torch.no_grad():
                for buffer in own.module.buffers():
                    buffer.add_(1 + own.replica)

    def _hand_on(self, own: Restorable, sharding: Sharding) -> None:
        names = {parameter: name for name, parameter in own.module.named_parameters()}
        for other in self.stages:
            if other.stage == own.stage:
                theirs = dict(other.module.named_parameters())
                for parameter, shard in sharding.shards.items():
                    theirs[names[parameter]].data.view(-1)[shard.start : shard.stop] = (
                        shard.stepped.data
                    )

    def save(self, folder: Path) -> None:
        folder.mkdir()
        contents = [(own, content_of(own)) for own in self.stages]
        parts = tuple(
            write_part(folder, own, content) for own, content in contents if content is not None
        )
        index = Checkpoint(
            tool="test",
            torch="any",
            model="any",
            graph_hash=self.graph.hash,
            config="any",
            schedule="1f1b",
            seed=0,
            minibatch=1,
            minibatch_size=1,
            minibatches_per_epoch=None,
            parts=parts,
        )
        save_index(folder, index)

    def restore(self, folder: Path) -> None:
        saved = load_checkpoint(folder)
        for own in self.stages:
            restore_stage(own, saved)

    def content(self, replica: int = 0) -> dict[str, Tensor]:
        """All that is saved, by name: the state of a tied parameter is that of the last stage that
        has it.
        """
        found: dict[str, Tensor] = {}
        for own in self.stages:
            if own.replica == replica:
                found |= {name: tensor.clone() for name, tensor in own.module.state_dict().items()}
                alike = [each for each in self.stages if each.stage == own.stage]
                found |= (
                    _divided_content(alike)
                    if self.divides
                    else _optimizer_content(own.optimizer, own.module)
                )
        return found


def _divided_content(replicas: Sequence[Restorable]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for own in replicas:
        names = {parameter: name for name, parameter in own.module.named_parameters()}
        for parameter, shard in own.sharding.shards.items() if own.sharding is not None else ():
            assert own.optimizer is not None
            for key, value in own.optimizer.state[shard.stepped].items():
                whole = found.setdefault(
                    f"{names[parameter]}.{key}", torch.empty_like(parameter, requires_grad=False)
                )
                if key == "step":
                    found[f"{names[parameter]}.{key}"] = value.clone()
                else:
                    whole.view(-1)[shard.start : shard.stop] = value
    return found


def _optimizer_content(optimizer: Optimizer | None, module: nn.Module) -> dict[str, Tensor]:
    return (
        {}
        if optimizer is None
        else {k: v.clone() for k, v in take_state(optimizer, module)[1].items()}
    )


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("model", ["convolutional", "blocks", "tied"])
def test_twenty_checkpoints_each_written_under_another_cut_than_it_was_read(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, buffers and optimizer state to the bit, and in the end in the unsplit model.

    Replicas divide the optimizer's state or do not, whatever those did that wrote it.
    """
    # small parameters are divided, too
    monkeypatch.setattr("planner.executor.communication.sharding.ALIGNMENT", 4)
    rng = random.Random(model)
    torch.manual_seed(1)
    path = write_tied(tmp_path) if model == "tied" else write_model(tmp_path, model, "adamw")
    spec = load_model_file(path)
    graphs = [capture_file(spec, spec.example_batch(4)) for _ in range(3)]
    graph = graphs[0]
    expected: dict[str, Tensor] = {}
    for number in range(20):
        cuts = sorted(
            rng.sample(range(1, len(graph.layers)), rng.randint(0, min(4, len(graph.layers) - 1)))
        )
        split = Split(spec, graphs[: rng.randint(1, 3)], cuts, divides=rng.random() < 0.6)
        if number:
            split.scramble()
            split.restore(tmp_path / str(number - 1))
            assert_equal(split.content(), expected)
        split.train()
        split.save(tmp_path / str(number))
        expected = split.content()
    whole = spec.build_model()
    planner.load_weights(whole, tmp_path / "19")
    trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
    optimizer = spec.optimizer(trained)
    fill_optimizer(Restorable(0, 0, whole, optimizer), load_checkpoint(tmp_path / "19"))
    assert_equal(
        {k: v.clone() for k, v in whole.state_dict().items()}
        | _optimizer_content(optimizer, whole),
        expected,
    )


def test_torchs_own_reader_of_safetensors_reads_a_checkpoint(tmp_path: Path) -> None:
    storage = pytest.importorskip(
        "torch.distributed.checkpoint.hf_storage", reason="this torch has no such reader"
    )
    spec = load_model_file(write_model(tmp_path, "convolutional", "momentum"))
    split = Split(spec, [capture_file(spec, spec.example_batch(4))], [3])
    split.train()
    split.save(tmp_path / "checkpoint")
    found = {name: torch.zeros_like(tensor) for name, tensor in split.content().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process only
        reader = storage.HuggingFaceStorageReader(str(tmp_path / "checkpoint"))
        load_distributed(found, storage_reader=reader)
    assert_equal(found, split.content())


def test_each_replica_gets_its_own_buffers_back_and_a_further_one_the_firsts(
    tmp_path: Path,
) -> None:
    spec = load_model_file(write_tied(tmp_path))
    graphs = [capture_file(spec, spec.example_batch(4)) for _ in range(3)]
    two = Split(spec, graphs[:2], [3])
    two.train()
    two.save(tmp_path / "two")
    expected = [{k: v for k, v in two.content(r).items() if "running_mean" in k} for r in range(2)]
    assert not torch.equal(*(content["blocks.0.1.running_mean"] for content in expected))
    three = Split(spec, graphs, [2, 4])
    three.scramble()
    three.restore(tmp_path / "two")
    for replica, source in enumerate((0, 1, 0)):
        found = {k: v for k, v in three.content(replica).items() if "running_mean" in k}
        assert_equal(found, expected[source])


def test_a_damaged_checkpoint_is_one_sentence_and_changes_no_model(tmp_path: Path) -> None:
    spec = load_model_file(write_model(tmp_path, "convolutional", "adamw"))
    graph = capture_file(spec, spec.example_batch(4))
    split = Split(spec, [graph], [4])
    split.train()
    split.save(tmp_path / "good")
    model = spec.build_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    damages: list[tuple[Callable[[Path], object], str]] = [
        (Path.unlink, "cannot be read|there is no"),
        (lambda path: path.write_bytes(path.read_bytes()[:-3]), "truncated|is not JSON|is corrupt"),
        (lambda path: path.write_bytes(b""), "has 0 bytes|is not JSON|is corrupt"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace(b"e", b"f", 1)),
            "is corrupt|missing|unknown|index",
        ),
    ]
    files = [
        path.name for path in sorted((tmp_path / "good").iterdir()) if "optimizer" not in path.name
    ]
    assert files == [
        INDEX,
        INDEX_DIGEST,
        "stage-0.weights.safetensors",
        "stage-1.weights.safetensors",
    ]
    for file in files:
        for number, (damage, words) in enumerate(damages):
            bad = tmp_path / f"bad-{number}-{file}"
            shutil.copytree(tmp_path / "good", bad)
            damage(bad / file)
            with pytest.raises(InputError, match=words):
                planner.load_weights(model, bad)
    assert_equal(before, dict(model.state_dict()))
    optimizer = spec.optimizer(list(model.parameters()))
    saved = load_checkpoint(tmp_path / "good")
    for path in (tmp_path / "good").glob("*.optimizer.*"):
        damages[1][0](path)
    with pytest.raises(InputError, match="truncated"):
        fill_optimizer(Restorable(0, 0, model, optimizer), saved)


# What a run would go on with in silence: each is a valid index.
CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another learning rate": lambda index: _group(index)["hyperparameters"].update(lr=0.5),
    "another momentum": lambda index: _group(index)["hyperparameters"].update(
        betas={"tuple": [0.5, 0.5]}
    ),
    "another minibatch": lambda index: index.update(minibatch=7),
    "another seed": lambda index: index.update(seed=9),
    "another stage's optimizer": lambda index: index["parts"][0].update(
        optimizer=index["parts"][1]["optimizer"]
    ),
    "no state of a parameter": lambda index: index["parts"][0]["optimizer"]["states"].popitem(),
    "no state at all": lambda index: index["parts"][0].update(optimizer=None),
    "no optimizer": lambda index: index["parts"][0].update(optimizer=None, optimizer_file=None),
    "no state of a scheduler": lambda index: index["parts"][0].update(
        extras={"scheduler": {"dict": []}}
    ),
    "an older version": lambda index: index.update(schema_version=1, seed=9),
}


def _group(index: dict[str, Any]) -> dict[str, Any]:
    group: dict[str, Any] = index["parts"][0]["optimizer"]["groups"][0]
    return group


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_index_is_refused(change: str, saved: Path) -> None:
    index = json.loads((saved / INDEX).read_text("utf-8"))
    CHANGES[change](index)
    (saved / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match=r"is corrupt: its SHA-256|neither|no checksum") as refusal:
        load_checkpoint(saved)
    assert refusal.value.hint


def test_an_index_under_the_name_of_another_minibatch_is_refused(
    saved: Path, tmp_path: Path
) -> None:
    assert load_checkpoint(saved.rename(tmp_path / "step-00000001")).index.minibatch == 1
    with pytest.raises(InputError, match="is of minibatch 1, and the folder's name is of another"):
        load_checkpoint((tmp_path / "step-00000001").rename(tmp_path / "step-00000009"))


def test_checkpoints_of_before_the_checksum_load(saved: Path) -> None:
    text = (saved / INDEX).read_text("utf-8")
    (saved / INDEX).write_text(
        text.replace('"schema_version": 2', '"schema_version": 1'), encoding="utf-8"
    )
    (saved / INDEX_DIGEST).unlink()
    assert load_checkpoint(saved).index.schema_version == 1


@pytest.fixture
def saved(once: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own for each test."""
    return shutil.copytree(once, tmp_path / "saved")


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("once")
    spec = load_model_file(write_model(folder, "convolutional", "adamw"))
    graph = capture_file(spec, spec.example_batch(4))
    split = Split(spec, [graph], [4])
    split.train()
    split.save(folder / "saved")
    return folder / "saved"


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    spec = load_model_file(write_model(tmp_path, "convolutional", "sgd"))
    graph = capture_file(spec, spec.example_batch(4))
    Split(spec, [graph], []).save(tmp_path / "one")
    write_tensors(tmp_path / "model.safetensors", spec.build_model().state_dict())
    small = spec.build_model()
    small.register_parameter("more", nn.Parameter(torch.zeros(1)))
    for path in (tmp_path / "one", tmp_path / "model.safetensors"):
        with pytest.raises(InputError, match=r"'more' is only in the model"):
            planner.load_weights(small, path)
        with pytest.raises(InputError, match=r"' is only in '"):
            planner.load_weights(nn.Sequential(), path)
    wide = spec.build_model()
    wide.head = nn.Linear(384, 11)
    with pytest.raises(
        InputError, match=r"'head\.weight' has the shape \(10, 384\).*\(11, 384\) in the model"
    ):
        planner.load_weights(wide, tmp_path / "one")
    with pytest.raises(InputError, match="is no complete file of tensors"):
        planner.load_weights(small, Path(__file__))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class _CrashError(BaseException):
    """The process ends here."""


def test_a_crash_at_any_moment_leaves_the_old_checkpoint_or_the_new_one(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends at its first, second, … call that changes the disk; what remains is then
    resumed from.
    """
    path = write_model(tmp_path, "convolutional", "momentum")
    spec = load_model_file(path)
    plan = make_plan(structural_profile(path, 4), (1,))
    graph = capture_file(spec, spec.example_batch(4))
    split = Split(spec, [graph], [])
    options = CheckpointOptions(
        checkpoint_every=5, checkpoint_folder=str(tmp_path / "folder"), keep=1, resume="auto"
    )
    job = Job(model=str(path), plan=plan, steps=50, checkpoints=options)
    data = DataPosition(4, None)

    calls = crash_at = 0
    done = False

    def counted(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == crash_at:
                raise _CrashError
            return function(*args, **kwargs)

        return call

    checkpointer = Checkpointer(job, split.stages, data, Heartbeat())
    checkpointer.begin(checkpointer.restore())
    checkpointer.save(5)
    contents, minibatch = {5: split.content()}, 10
    while not done:
        crash_at += 1
        calls = 0
        with monkeypatch.context() as patch:
            for owner, name in (
                (os, "fsync"),
                (os, "mkdir"),
                (os, "rename"),
                (os, "replace"),
                (os, "unlink"),
            ):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
            try:
                checkpointer = Checkpointer(job, split.stages, data, Heartbeat())
                checkpointer.begin(checkpointer.restore())
                split.train()
                contents[minibatch] = split.content()
                checkpointer.save(minibatch)
                done = True
            except _CrashError:
                pass
        (found,) = complete(tmp_path / "folder")[-1:]
        split.scramble()
        checkpointer = Checkpointer(job, split.stages, data, Heartbeat())
        assert checkpointer.resumed_from == found
        resumed = checkpointer.restore()
        assert resumed in (minibatch - 5, minibatch)
        assert_equal(split.content(), contents[resumed])
        minibatch = resumed + 5
    assert crash_at > 8
    assert names(tmp_path / "folder") == [LOCK, FILE, f"step-{minibatch - 5:08}"]


def test_a_full_disk_keeps_the_older_checkpoints_and_training(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_model(tmp_path, "convolutional", "momentum")
    spec = load_model_file(path)
    plan = make_plan(structural_profile(path, 4), (1,))
    split = Split(spec, [capture_file(spec, spec.example_batch(4))], [])
    options = CheckpointOptions(
        checkpoint_every=5, checkpoint_folder=str(tmp_path / "folder"), keep=1
    )
    checkpointer = Checkpointer(
        Job(model=str(path), plan=plan, steps=50, checkpoints=options),
        split.stages,
        DataPosition(4, None),
        Heartbeat(),
    )
    checkpointer.begin(checkpointer.restore())
    losses = [(minibatch, minibatch / 2) for minibatch in range(15)]
    checkpointer.save(5, losses[:5])
    checkpointer.check_last()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        checkpointer.save(10, losses[:10])
    assert "the checkpoint after minibatch 10 could not be written" in caplog.text
    assert "No space left on device" in caplog.text
    assert names(tmp_path / "folder") == [LOCK, FILE, "step-00000005"]
    with pytest.raises(PlannerError, match=r"the last checkpoint could not .*step-00000005"):
        checkpointer.check_last()
    checkpointer.save(15, losses)
    checkpointer.check_last()
    assert names(tmp_path / "folder") == [LOCK, FILE, "step-00000015"]
    past = RunLog(tmp_path / "folder", "").begin(15, again=True)
    assert [(loss.minibatch, loss.loss) for loss in past.losses] == losses


@pytest.fixture
def one_stage(tmp_path: Path) -> tuple[Job, Split]:
    """A job without checkpoints, and the whole model as its stage."""
    path = write_model(tmp_path, "convolutional", "momentum")
    spec = load_model_file(path)
    plan = make_plan(structural_profile(path, 4), (1,))
    split = Split(spec, [capture_file(spec, spec.example_batch(4))], [])
    return Job(model=str(path), plan=plan, steps=500), split


def in_folder(one_stage: tuple[Job, Split], size: int, **options: Unpack[Chosen]) -> Checkpointer:
    """Begin or continue a run in minibatches of `size`, as `plan train --resume` does."""
    job, split = one_stage
    chosen = CheckpointOptions(checkpoint_every=1, resume="auto", **options)
    checkpointer = Checkpointer(
        replace(job, checkpoints=chosen), split.stages, DataPosition(size, None), Heartbeat()
    )
    checkpointer.begin(checkpointer.restore())
    return checkpointer


class Chosen(TypedDict):
    """Where checkpoints are written, and how many are kept."""

    checkpoint_folder: str
    keep: int


def test_larger_minibatches_do_not_make_new_checkpoints_the_oldest(
    alone: None, one_stage: tuple[Job, Split], tmp_path: Path
) -> None:
    """200 minibatches of 4 samples are 100 of 8, and what follows is newer all the same."""
    folder = tmp_path / "folder"
    options = Chosen(checkpoint_folder=str(folder), keep=2)
    small = in_folder(one_stage, 4, **options)
    for minibatch in (160, 180, 200):
        small.save(minibatch)

    large = in_folder(one_stage, 8, **options)
    assert large.found == 100
    large.save(120)
    assert large.newest == folder / "step-00000120"
    assert [path.name for path in complete(folder)] == ["step-00000200", "step-00000120"]
    assert find(folder) == resolve("auto", folder, writes=True) == large.newest
    with pytest.raises(InputError, match=r"newer checkpoint than .*step-00000200': step-00000120"):
        resolve(str(folder / "step-00000200"), folder, writes=True)

    large.save(200)  # whose name another has
    assert large.newest == folder / "step-00000200-5"
    again = in_folder(one_stage, 8, **options)
    assert (again.resumed_from, again.found) == (large.newest, 200)
    again.save(220)
    assert [path.name for path in complete(folder)] == ["step-00000200-5", "step-00000220"]


def test_checkpoints_of_before_sequence_numbers_come_first(
    alone: None, one_stage: tuple[Job, Split], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    options = Chosen(checkpoint_folder=str(folder), keep=3)
    small = in_folder(one_stage, 4, **options)
    for minibatch in (10, 20, 30):
        small.save(minibatch)
        index = load_checkpoint(folder / f"step-{minibatch:08}").index
        save_index(folder / f"step-{minibatch:08}", replace(index, sequence=0))
    assert [load_checkpoint(path).index.minibatch for path in complete(folder)] == [10, 20, 30]

    in_folder(one_stage, 8, **options).save(16)
    assert [load_checkpoint(path).index.minibatch for path in complete(folder)] == [20, 30, 16]


def test_a_loop_of_ones_own_writes_where_it_wrote_before_and_nowhere_else(
    alone: None, one_stage: tuple[Job, Split], tmp_path: Path
) -> None:
    """Folders in turn, each locked while it is written to; `keep` may change each time."""
    job, split = one_stage
    last, best = tmp_path / "last", tmp_path / "best"
    run = Checkpointer(job, split.stages, DataPosition(4, None), Heartbeat())
    for minibatch in (1, 2, 3):
        run.write_to(last, minibatch, keep=minibatch)
        run.save(minibatch)
        run.write_to(best, minibatch, keep=1)
        run.save(minibatch)
        assert [path.name[-1:] for path in complete(last)] == ["1", "2", "3"][:minibatch]
        assert [path.name[-1:] for path in complete(best)] == [str(minibatch)]

    with (last / LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as another run does meanwhile
        with pytest.raises(InputError, match="another run, process"):
            run.write_to(last, 4, keep=1)
    with (best / LOCK).open("r+") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    stranger = Checkpointer(job, split.stages, DataPosition(4, None), Heartbeat())
    with pytest.raises(InputError, match="has checkpoints of an earlier run"):
        stranger.write_to(last, 0, keep=1)


def test_a_second_checkpoint_after_as_many_minibatches_replaces_the_first(
    alone: None,
    one_stage: tuple[Job, Split],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any moment one of the two is there, whichever call a crash prevents."""
    split = one_stage[1]
    run = in_folder(one_stage, 4, checkpoint_folder=str(tmp_path / "folder"), keep=1)
    run.save(5)
    rename = Path.rename
    for crash_at in range(4):
        split.train()
        left = iter(range(crash_at))

        def crash(path: Path, name: Path, left: Iterator[int] = left) -> Path:
            if next(left, None) is None:
                raise _CrashError
            return rename(path, name)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", crash)
            with suppress(_CrashError):
                run.save(5)
        assert find(tmp_path / "folder")
        run.save(5)
        assert names(tmp_path / "folder") == [LOCK, FILE, "step-00000005"]
        expected = split.content()
        split.scramble()
        split.restore(tmp_path / "folder" / "step-00000005")
        assert_equal(split.content(), expected)


def test_a_damaged_checkpoint_is_neither_passed_over_nor_counted(
    alone: None, one_stage: tuple[Job, Split], tmp_path: Path
) -> None:
    """Where the newest cannot be read, nobody goes on from an older one in silence."""
    folder = tmp_path / "folder"
    options = Chosen(checkpoint_folder=str(folder), keep=2)
    run = in_folder(one_stage, 4, **options)
    run.save(10)
    run.save(20)
    (folder / "step-00000020" / INDEX).write_text("{", encoding="utf-8")
    assert find(folder) == folder / "step-00000020"
    with pytest.raises(InputError, match="is not JSON"):
        in_folder(one_stage, 4, **options)

    run.save(15)
    assert [load_checkpoint(path).index.minibatch for path in complete(folder)[:2]] == [10, 15]
    run.save(30)
    run.save(40)
    assert [path.name for path in complete(folder)] == ["step-00000030", "step-00000040"]


def test_which_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert resolve(None, folder, writes=True) is None
    assert resolve("auto", folder, writes=True) is None
    for name in (
        "step-00000005",
        "step-00000030",
        "step-100000000",
        ".step-100000005.abc.partial",
        "step-notes",
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / INDEX).touch()
    newest = folder / "step-100000000"
    assert resolve("auto", folder, writes=True) == newest
    assert resolve(str(folder), folder, writes=True) == newest
    assert find(folder / "step-00000005") == folder / "step-00000005"
    with pytest.raises(
        InputError, match="has checkpoints of an earlier run, the newest step-100000000"
    ):
        resolve(None, folder, writes=True)
    with pytest.raises(InputError, match="has a newer checkpoint than"):
        resolve(str(folder / "step-00000005"), folder, writes=True)
    assert resolve(str(folder / "step-00000005"), folder, writes=False) == folder / "step-00000005"
    assert resolve(str(newest), tmp_path / "other", writes=True) == newest
    with pytest.raises(InputError, match="there is no checkpoint"):
        resolve(str(tmp_path / "nothing"), folder, writes=False)
    with pytest.raises(InputError, match="there is no complete checkpoint in"):
        find(tmp_path)
    with pytest.raises(InputError, match="there is no checkpoint"):
        find(newest / INDEX)
    with pytest.raises(InputError, match="is a file, not a folder for checkpoints"):
        resolve(None, newest / INDEX, writes=True)


@pytest.mark.parametrize(
    ("done", "size", "per_epoch", "new_size", "new_per_epoch", "expected"),
    [
        (7, 4, 5, 4, 5, 7),
        (40, 4, None, 16, None, 10),
        (41, 4, None, 16, None, 11),  # three of the samples are left out, none is seen twice
        (13, 4, 10, 8, 5, 7),  # 12 samples into the second epoch: the next 8 begin at 16
        # 36 of 40 samples of the second epoch: behind its last, smaller minibatch
        (19, 4, 10, 16, 3, 6),
        (13, 8, 5, 4, 10, 26),
    ],
)
def test_the_place_in_the_data_in_minibatches_of_another_size(
    done: int,
    size: int,
    per_epoch: int | None,
    new_size: int,
    new_per_epoch: int | None,
    expected: int,
) -> None:
    index = Checkpoint(
        tool="test",
        torch="any",
        model="any",
        graph_hash="any",
        config="1",
        schedule="1f1b",
        seed=0,
        minibatch=done,
        minibatch_size=size,
        minibatches_per_epoch=per_epoch,
        parts=(),
    )
    assert (
        position(SavedCheckpoint(Path("any"), index), DataPosition(new_size, new_per_epoch))
        == expected
    )


# What the index has of the data, what they are now, and what is said; None where it continues.
OTHER_DATA: dict[str, tuple[dict[str, Any], DataPosition, str | None]] = {
    "fewer minibatches": (
        {},
        DataPosition(4, 8),
        r"dataset\(\) has 8 minibatches, but had 9 in the run of the checkpoint 'any'",
    ),
    "as many minibatches": (
        {"samples": 33},
        DataPosition(4, 9, samples=36),
        r"dataset\(\) has 36 samples, but had 33",
    ),
    "larger minibatches": (
        {"samples": 33},
        DataPosition(8, 9, samples=66),
        r"dataset\(\) has 66 samples, but had 33",
    ),
    "older": ({}, DataPosition(4, 9, samples=36, order=1), None),
    "no dataset": ({}, DataPosition(8, None), "has no minibatches, but had 9"),
    "a script's": (
        {"minibatches_per_epoch": None, "fed": True},
        DataPosition(8, 5, samples=36),
        r"dataset\(\) has 5 minibatches, but a script handed in those of the run",
    ),
    "into a script": (
        {"samples": 33},
        DataPosition(8, None, fed=True),
        r"a script hands in the minibatches, but dataset\(\) had 9",
    ),
    "from script to script": (
        {"minibatches_per_epoch": None, "fed": True},
        DataPosition(8, None, fed=True),
        None,
    ),
    "another sampler": (
        {"samples": 33, "order": 1},
        DataPosition(4, 9, samples=33, order=2),
        "come in another order than in the run",
    ),
    "no sampler": (
        {"samples": 33, "order": 1},
        DataPosition(4, 9, samples=33),
        "come in another order than in the run",
    ),
    "a sampler of other minibatches": (
        {"samples": 33, "order": 1},
        DataPosition(8, 5, samples=33, order=2),
        r"with minibatches of 8 samples sampler\(\) gives another order than with those of 4 in",
    ),
    "a sampler of any minibatches": (
        {"samples": 33, "order": 1},
        DataPosition(8, 5, samples=33, order=1),
        None,
    ),
    "a sampler between epochs": (
        {"samples": 33, "order": 1, "minibatch": 18},
        DataPosition(8, 5, samples=33, order=2),
        None,
    ),
}


@pytest.mark.parametrize("name", OTHER_DATA)
def test_other_data_is_refused(name: str) -> None:
    changes, data, words = OTHER_DATA[name]
    index = Checkpoint(
        tool="test",
        torch="any",
        model="any",
        graph_hash="any",
        config="1",
        schedule="1f1b",
        seed=0,
        minibatch=3,
        minibatch_size=4,
        minibatches_per_epoch=9,
        parts=(),
    )
    saved = SavedCheckpoint(Path("any"), replace(index, **changes))
    if words is None:
        assert position(saved, data) == -(-saved.index.minibatch * 4 // data.minibatch_size) + (
            name == "a sampler between epochs"
        )
        return
    with pytest.raises(InputError, match=words) as refusal:
        position(saved, data)
    assert refusal.value.hint
