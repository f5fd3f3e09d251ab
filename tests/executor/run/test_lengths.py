"""Batches whose lengths vary train as in one process, which knows nothing of stages, captures and messages."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.executor.run.data import make_batches
from planner.formats.plan import Plan, save_plan
from planner.formats.plan_parts import PlannedLengths
from planner.formats.profile import LossMean, Profile
from planner.model.batch import Batch
from planner.model.spec import TrainingSpec, load_model_file
from planner.options.training import CheckpointOptions, TrainingOptions
from planner.schedule.instructions import Unit
from planner.schedule.registry import find
from planner.workers.job import Job, TrainResult
from tests.executor.plans import in_groups, make_plan, sharded, structural_profile
from tests.executor.processes import TIMEOUT_S, run_jobs
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training
from tests.executor.run.test_exactness import recomputing

SIZE, SEED, SAMPLES = 2, 3, 60

# A causal language model. Padded to the longest of each microbatch; padding counts in no loss.
CAUSAL = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        heads = [part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(23, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(16, 23)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def build_model():
    return Net().double()

def lengths():
    return {"words": (3, 12)}

def example_batch(batch_size, words):
    tokens = torch.randint(1, 23, (batch_size, words + 1))
    return (tokens[:, :-1],), tokens[:, 1:]

def sample(number):
    generator = torch.Generator().manual_seed(number)
    words = int(torch.randint(3, 13, (), generator=generator))
    return torch.randint(1, 23, (words + 1,), generator=generator)

class Sentences(torch.utils.data.Dataset):
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return sample(self.first + index)

def dataset():
    return Sentences(0, SAMPLES)

def evaluation_dataset():
    return Sentences(1000, 14)

def collate(samples):
    inputs = nn.utils.rnn.pad_sequence([each[:-1] for each in samples], batch_first=True)
    return (inputs,), nn.utils.rnn.pad_sequence([each[1:] for each in samples], batch_first=True, padding_value=-100)

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""

# An encoder and a decoder, each with a length of its own; labels are padded.
TRANSLATOR = (
    CAUSAL
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(23, 16), nn.Embedding(23, 16)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(16, 23)

    def forward(self, source, target):
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)

def lengths():
    return {"source": (3, 12), "target": (2, 9)}

def example_batch(batch_size, source, target):
    labels = torch.randint(1, 23, (batch_size, target + 1))
    return (torch.randint(1, 23, (batch_size, source)), labels[:, :-1]), labels[:, 1:]

def collate(samples):
    pad = lambda rows, value: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    targets = [each.flip(0)[: 3 + len(each) // 2] for each in samples]
    return (pad(samples, 0)[:, :12], pad([t[:-1] for t in targets], 0)), pad([t[1:] for t in targets], -100)
"""
)

MODELS = {"causal": CAUSAL, "translator": TRANSLATOR}


def write(folder: Path, model: str) -> Path:
    path = folder / f"{model}.py"
    path.write_text(MODELS[model].replace("SAMPLES", str(SAMPLES)), encoding="utf-8")
    return path


def by_labels(plan: Plan) -> Plan:
    """The plan whose microbatches count by their labels that are no padding."""
    return plan.model_copy(update={"loss": LossMean(over="labels", ignored=-100)})


def train(folder: Path, jobs: Sequence[Job]) -> list[tuple[TrainResult, Weights]]:
    named = [job.model_copy(update={"save_weights": str(folder / f"{n}.pt")}) for n, job in enumerate(jobs)]
    results = run_jobs(named, folder)
    return [(r, torch.load(str(j.save_weights), weights_only=True)) for r, j in zip(results, named, strict=True)]


def loss_of(model: nn.Module, spec: TrainingSpec, batch: Batch) -> Tensor:
    """The loss of the model as its file has it."""
    assert spec.loss is not None
    return spec.loss(model(*batch.args, **batch.kwargs), batch.target)


class Reference:
    """The model of a file in one process."""

    def __init__(self, path: Path, plan: Plan, profile: Profile) -> None:
        self.spec, self.plan = load_model_file(str(path)), plan
        torch.manual_seed(SEED)
        self.model = self.spec.build_model()
        self.data = make_batches(self.spec, SIZE, plan.microbatches, SEED)
        owner = {name: layer.name for layer in profile.layers for name in layer.parameters}
        stage_of = {layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers}
        names = [name for name, _ in self.model.named_parameters()]
        self.names = [[n for n in names if stage_of[owner[n]] == s] for s in range(len(plan.stages))]
        self.seen: set[tuple[int, ...]] = set()

    def microbatch(self, minibatch: int, number: int) -> Batch:
        batch = self.data.batch(Unit(minibatch, number))
        self.seen.add(tuple(batch.args[0].shape))
        return batch

    def train(self, minibatches: int) -> tuple[list[float], Weights]:
        """Train on the plan's data, by the formula of its schedule."""
        if self.plan.schedule.name == "1f1b":
            return delayed_updates(
                self.model,
                self.names,
                self.plan.replicas,
                self.spec.optimizer,
                lambda model, minibatch: loss_of(model, self.spec, self.microbatch(minibatch, 0)),
                minibatches,
            )
        if self.plan.schedule.name == "2bw":

            def scaled(model: nn.Module, minibatch: int, number: int) -> Tensor:
                share = self.shares(minibatch)[number] * self.plan.microbatches
                return loss_of(model, self.spec, self.microbatch(minibatch, number)) * share

            microbatches = self.plan.microbatches
            return double_buffered(
                self.model, self.names, self.plan.replicas, self.spec.optimizer, scaled, minibatches, microbatches
            )

        def losses(model: nn.Module, minibatch: int) -> list[Tensor]:
            count = self.plan.microbatches
            parts = [self.microbatch(minibatch, number) for number in range(count)]
            shares = self.shares(minibatch)
            return [loss_of(model, self.spec, p) * s * count for p, s in zip(parts, shares, strict=True)]

        return plain_training(self.model, self.spec.optimizer, losses, minibatches)

    def shares(self, minibatch: int) -> list[float]:
        """The share of each microbatch in the labels that are no padding."""
        counts = [
            int((self.microbatch(minibatch, number).target != -100).sum()) for number in range(self.plan.microbatches)
        ]
        return [count / sum(counts) for count in counts]


CASES = [
    ("1f1b", (1, 1), 1),
    ("1f1b", (2, 1, 1), 1),
    ("1f1b-flush", (1, 1), 3),
    ("1f1b-flush", (2, 2), 4),
    ("gpipe", (1, 1), 3),
    ("2bw", (1, 1), 3),
    ("2bw", (2, 1, 1), 4),
    ("zb-h1", (1, 1), 3),
    ("interleaved", (1,) * 4, 4),
]


@pytest.mark.parametrize(
    ("model", "workers"),
    [
        pytest.param("translator", 2, id="translator 2"),
        pytest.param("causal", 4, id="causal 4"),
        pytest.param("causal", 2, id="causal 2", marks=pytest.mark.slow),
        pytest.param("translator", 4, id="translator 4", marks=pytest.mark.slow),
    ],
)
def test_losses_and_weights_equal_one_process(model: str, workers: int, tmp_path: Path) -> None:
    path = write(tmp_path, model)
    profile = structural_profile(path, SIZE)
    plans = []
    for schedule, replicas, microbatches in CASES:
        chunks = 2 if find(schedule).chunked else 1
        if sum(replicas) // chunks == workers:
            plans.append(by_labels(make_plan(profile, replicas, schedule, microbatches, chunks=chunks)))
    if workers == 2:
        plans.append(recomputing(plans[1], (True, 2)))
    else:
        plans.append(sharded(plans[1]))
    minibatches = 7
    jobs = [Job(model=str(path), plan=plan, steps=minibatches, seed=SEED) for plan in plans]
    for plan, (result, weights) in zip(plans, train(tmp_path, jobs), strict=True):
        reference = Reference(path, plan, profile)
        losses, expected = reference.train(minibatches)
        assert len({shape[1] for shape in reference.seen}) > 2  # or nothing varied
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-9), plan.schedule.name
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-7, atol=1e-9, msg=f"{plan.schedule.name} {name}")


GNMT = """
from pathlib import Path
import torch
import torch.nn.functional as F
from planner.model.samplers import BucketSampler
from planner.model.spec import import_file

GNMT8 = import_file(Path("ROOT/profiles/gnmt8/model.py"))
WORDS = [int(2 + 40 * torch.rand((), generator=torch.Generator().manual_seed(number)) ** 2) for number in range(60)]

def build_model():
    model = GNMT8.GNMT(2, 8, 30).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model

def lengths():
    return {"source": (2, 42), "target": (2, 43)}

def example_batch(batch_size, source, target):
    words = torch.randint(1, 30, (batch_size, target + 1))
    return (torch.randint(1, 30, (batch_size, source)), words[:, :-1]), words[:, 1:]

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return len(WORDS)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return [torch.randint(1, 30, (WORDS[index] + more,), generator=generator) for more in (0, 2)]

def dataset():
    return Sentences()

def sampler(microbatch_size, microbatches, seed):
    return BucketSampler(WORDS, microbatch_size, microbatches, seed=seed, pool=4)

def collate(samples):
    pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    sources, targets = zip(*samples)
    return (pad(sources, 0), pad([each[:-1] for each in targets], 0)), pad([each[1:] for each in targets], -100)

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
""".replace("ROOT", str(Path(__file__).resolve().parents[3]))


def test_gnmt_in_buckets(tmp_path: Path) -> None:
    """Of LSTM layers over sentences of any length, which PyTorch's tracer would unroll and pin."""
    path = tmp_path / "gnmt.py"
    path.write_text(GNMT, encoding="utf-8")
    profile = structural_profile(path, SIZE)
    plans = [by_labels(make_plan(profile, (1, 1), *how)) for how in (("1f1b", 1), ("1f1b-flush", 3), ("2bw", 3))]
    jobs = [Job(model=str(path), plan=plan, steps=8, seed=SEED) for plan in plans]
    for plan, (result, weights) in zip(plans, train(tmp_path, jobs), strict=True):
        reference = Reference(path, plan, profile)
        losses, expected = reference.train(8)
        assert len({shape[1] for shape in reference.seen}) > 4
        assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-9), plan.schedule.name
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-7, atol=1e-9, msg=f"{plan.schedule.name} {name}")


def test_groups_of_ranks_that_divide_layers(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    profile = structural_profile(path, SIZE)
    plan = by_labels(make_plan(profile, (1, 1), "1f1b-flush", 3))
    ((result, weights),) = train(tmp_path, [Job(model=str(path), plan=in_groups(plan, 2), steps=5, seed=SEED)])
    losses, expected = Reference(path, plan, profile).train(5)
    assert [entry.loss for entry in result.losses] == pytest.approx(losses, rel=1e-9)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-7, atol=1e-9, msg=name)


def test_evaluation_and_resuming_within_an_epoch(tmp_path: Path) -> None:
    """The second run begins in the middle of the buckets of the first."""
    path = tmp_path / "causal.py"
    more = """
from planner.model.samplers import BucketSampler

def sampler(microbatch_size, microbatches, seed):
    return BucketSampler([len(sample(number)) for number in range(SAMPLES)], microbatch_size, microbatches, seed=seed)
"""
    path.write_text((CAUSAL + more).replace("SAMPLES", str(SAMPLES)), encoding="utf-8")
    profile = structural_profile(path, SIZE)
    plan = by_labels(make_plan(profile, (1, 1), "1f1b-flush", 3))
    options = TrainingOptions(evaluate_every=3)
    checkpoints = CheckpointOptions(folder=str(tmp_path / "saved"), every=4, keep=9)
    whole = Job(model=str(path), plan=plan, steps=11, seed=SEED, options=options)
    first = whole.model_copy(update={"steps": 4, "checkpoints": checkpoints})
    second = whole.model_copy(update={"checkpoints": CheckpointOptions(resume=str(tmp_path / "saved"))})
    (one, weights), _, (rest, resumed) = train(tmp_path, [whole, first, second])
    assert [entry.loss for entry in one.losses[4:]] == [entry.loss for entry in rest.losses]
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights.items())

    reference = Reference(path, plan, profile)
    spec, counted, total = reference.spec, 0, 0.0
    reference.train(11)
    data = spec.evaluation_dataset()
    with torch.no_grad():
        for start in range(0, 14, SIZE):
            batch = spec.collate([data[index] for index in range(start, start + SIZE)])
            labels = int((batch.target != -100).sum())
            total += float(loss_of(reference.model, spec, batch)) * labels
            counted += labels
    assert [each.minibatch for each in one.evaluations] == [3, 6, 9, 11]
    assert one.evaluations[-1].loss == pytest.approx(total / counted, rel=1e-9)


def test_a_length_beyond_the_greatest_ends_the_run_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    source = CAUSAL.replace("SAMPLES", "8").replace('"words": (3, 12)', '"words": (3, 10)')
    path.write_text(source, encoding="utf-8")
    plan = by_labels(make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush", 2))
    with pytest.raises(AssertionError, match=r"has a length of 1[12] in dimension 1 of its tensor 0.* is 3 to 10"):
        run_jobs([Job(model=str(path), plan=plan, steps=2, seed=SEED)], tmp_path)


def test_a_run_warns_once_of_lengths_that_the_plan_was_not_made_for(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    plan = by_labels(make_plan(structural_profile(path, SIZE), (1, 1), "1f1b-flush", 2))
    data = make_batches(load_model_file(str(path)), SIZE, 2, SEED)
    words = [data.batch(Unit(minibatch, number)).args[0].shape[1] for minibatch in range(15) for number in range(2)]
    jobs = []
    for lengths in (words, [4, 5]):
        rows = tuple((each,) for each in lengths)
        made_for = PlannedLengths(names=("words",), least=(3,), most=(12,), order="random", microbatches=rows)
        own = plan.model_copy(update={"lengths": made_for})
        jobs.append(Job(model=str(path), plan=own, steps=20, seed=SEED))
    run_jobs(jobs, tmp_path)
    warnings = [line for line in (tmp_path / "workers.log").read_text("utf-8").splitlines() if "was made for" in line]
    assert len(warnings) == 1
    assert re.search(
        r"the mean length 'words' of microbatches is \d+\.\d, and the plan was made for 4\.5;", warnings[0]
    )


OWN_LOOP = """
import json, os, torch, planner

torch.set_num_threads(1)
spec = planner.load_model_file("causal.py")
generator = torch.Generator().manual_seed(5)

def batch(size, words):
    tokens = torch.randint(1, 23, (size, words + 1), generator=generator)
    return (tokens[:, :-1],), tokens[:, 1:]

with planner.pipeline(planner.load_plan("plan.json"), "causal.py", seed=SEED, evaluates=True) as pipeline:
    for words in (5, 12, 3, 9):
        pipeline.step(batch(6, words))
    pipeline.drain()
    evaluations = [pipeline.evaluate([batch(2, a), batch(2, b)]).loss for a, b in ((4, 11), (8, 3))]
    if os.environ["RANK"] == "0":
        with open("report.json", "w") as file:
            json.dump([list(pipeline.losses.values()), evaluations], file)
    pipeline.step(batch(6, 13))
"""


def test_a_loop_of_the_users_own(tmp_path: Path) -> None:
    path = write(tmp_path, "causal")
    save_plan(make_plan(structural_profile(path, 2), (1, 1), "1f1b-flush", 3), tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(OWN_LOOP.replace("SEED", str(SEED)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment, cwd=tmp_path
    )
    assert "minibatch 4 has a length of 13 in dimension 1" in done.stderr, done.stderr
    losses, evaluations = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))

    spec = load_model_file(str(path))
    torch.manual_seed(SEED)
    model = spec.build_model()
    generator = torch.Generator().manual_seed(5)

    def batch(size: int, words: int) -> Batch:
        tokens = torch.randint(1, 23, (size, words + 1), generator=generator)
        return Batch((tokens[:, :-1],), target=tokens[:, 1:])

    optimizer, expected = spec.optimizer(model.parameters()), []
    for words in (5, 12, 3, 9):
        optimizer.zero_grad()
        loss = loss_of(model, spec, batch(6, words))
        torch.autograd.backward(loss)
        optimizer.step()
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-9)
    with torch.no_grad():
        means = [[float(loss_of(model, spec, batch(2, words))) for words in pair] for pair in ((4, 11), (8, 3))]
    assert evaluations == pytest.approx([sum(pair) / 2 for pair in means], rel=1e-9)
