"""Trainings whose loss runs in chunks of tokens equal one process that computes the same chunks,
and those with the loss of all tokens to rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.errors import CaptureError, PlanError
from planner.executor.run.data import make_batches
from planner.executor.run.stages import build_modules
from planner.formats.plan import Plan
from planner.formats.profile import ChunkedLoss, LossMean
from planner.model.spec import load_model_file
from planner.options.training import TrainingOptions
from planner.plan.trainable import check_divided
from planner.schedule.instructions import Unit
from planner.workers.job import Job, TrainResult
from tests.executor.plans import in_groups, make_plan, structural_profile
from tests.executor.processes import run_jobs

pytestmark = pytest.mark.usefixtures("warm_start")

SIZE, SEED, STEPS, CHUNKS = 4, 3, 5, 3
CHUNKED = ChunkedLoss(chunks=CHUNKS, head="head", again_s=1e-3)
PADDED = LossMean(over="labels", ignored=-100)

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(23, 8)
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        self.head = nn.Linear(8, 23, bias=False)
        TIED

    def forward(self, tokens):
        return self.head(torch.tanh(self.blocks(self.embedding(tokens))))

class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 23, (6,), generator=generator)
        labels = torch.randint(0, 23, (6,), generator=generator)
        labels[1 + index % 6:] = -100
        return (tokens,), labels

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randint(0, 23, (batch_size, 6)),), torch.randint(0, 23, (batch_size, 6))

def loss(output, target):
    logits = output.flatten(0, 1)
    return nn.functional.cross_entropy(logits, target.flatten(), label_smoothing=0.1)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

def dataset():
    return Sequences()

def evaluation_dataset():
    return Sequences()
"""
TIED = "self.head.weight = self.embedding.weight"

Weights = dict[str, Tensor]


def model_file(folder: Path, *, tied: bool = False) -> Path:
    path = folder / ("tied.py" if tied else "untied.py")
    path.write_text(MODEL.replace("TIED", TIED if tied else ""), encoding="utf-8")
    return path


def plan_of(path: Path, replicas: tuple[int, ...], schedule: str, microbatches: int) -> Plan:
    profile = structural_profile(path, SIZE).model_copy(
        update={"loss": PADDED, "chunked_loss": CHUNKED}
    )
    chunks = 2 if schedule == "interleaved" else 1
    return make_plan(profile, replicas, schedule, microbatches, chunks=chunks)


def trained(
    folder: Path, path: Path, plans: list[Plan], evaluate_every: int | None = None
) -> list[tuple[TrainResult, Weights]]:
    """Train each plan in worker processes; return the results and the weights."""
    jobs = [
        Job(
            model=str(path),
            plan=plan,
            steps=STEPS,
            seed=SEED,
            save_weights=str(folder / f"{number}.pt"),
            options=TrainingOptions(evaluate_every=evaluate_every),
        )
        for number, plan in enumerate(plans)
    ]
    results = run_jobs(jobs, folder)
    saved = [torch.load(str(job.save_weights), weights_only=True) for job in jobs]
    return list(zip(results, saved, strict=True))


def whole(plan: Plan) -> Plan:
    return plan.model_copy(update={"chunked_loss": None})


def losses_of(result: TrainResult) -> torch.Tensor:
    """With the rounding of the numbers that the workers computed."""
    return torch.tensor([each.loss for each in result.losses], dtype=torch.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("schedule", "replicas", "microbatches"),
    [
        ("1f1b-flush", (1, 1), 2),
        ("1f1b", (1, 1), 1),
        ("2bw", (1, 1), 2),
        ("zb-h1", (1, 1), 2),
        ("gpipe", (2,), 2),
        ("interleaved", (1, 1, 1, 1), 2),
    ],
)
def test_chunks_train_as_the_loss_of_all_tokens(
    tmp_path: Path, schedule: str, replicas: tuple[int, ...], microbatches: int
) -> None:
    path = model_file(tmp_path)
    plan = plan_of(path, replicas, schedule, microbatches)
    assert plan.chunked_loss == CHUNKED

    (in_chunks, weights), (at_once, expected) = trained(tmp_path, path, [plan, whole(plan)])

    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(losses_of(in_chunks), losses_of(at_once))


def test_two_stages_equal_one_process_with_the_same_chunks(tmp_path: Path) -> None:
    """To the bit, with a head that is the embedding of the other stage."""
    path = model_file(tmp_path, tied=True)
    [(result, weights)] = trained(tmp_path, path, [plan_of(path, (1, 1), "1f1b-flush", 1)])

    losses, expected = by_hand(path)
    assert [each.loss for each in result.losses] == losses
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


def by_hand(path: Path) -> tuple[list[float], Weights]:
    """Train the model in this process, with the loss in chunks that are written here."""
    spec = load_model_file(str(path))
    torch.manual_seed(SEED)
    model = spec.build_model()
    assert isinstance(model, nn.Module)
    optimizer = spec.optimizer(list(model.parameters()))
    batches = make_batches(spec, SIZE, 1, SEED)

    losses = []
    for number in range(STEPS):
        batch = batches.batch(Unit(number, 0))
        labels = batch.target.flatten()
        states = model.get_submodule("blocks")(model.get_submodule("embedding")(*batch.args))
        rows = torch.tanh(states).flatten(0, 1)
        head = model.get_parameter("head.weight")
        parts = [
            F.cross_entropy(F.linear(part, head), its, reduction="none", label_smoothing=0.1)
            for part, its in zip(rows.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
        ]
        loss = torch.cat(parts).sum() / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_evaluation_in_chunks_gives_the_same_losses(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    plan = plan_of(path, (1, 1), "1f1b-flush", 2)

    (in_chunks, _), (at_once, _) = trained(
        tmp_path, path, [plan, whole(plan)], evaluate_every=STEPS
    )

    assert len(in_chunks.evaluations) == len(at_once.evaluations) > 0
    for ours, other in zip(in_chunks.evaluations, at_once.evaluations, strict=True):
        assert ours.loss == pytest.approx(other.loss, rel=1e-5)


def test_a_loss_that_needs_all_logits_is_refused(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    text = path.read_text("utf-8").replace(
        "return nn.functional.cross_entropy(", "return logits.square().mean() + F("
    )
    path.write_text(text + "\nF = nn.functional.cross_entropy\n", encoding="utf-8")
    job = Job(model=str(path), plan=plan_of(path, (1, 1), "1f1b-flush", 1), steps=1, seed=SEED)

    with pytest.raises(CaptureError, match=r"square\.default reads the logits, too"):
        build_modules(job, [0], load_model_file(str(path)), "cpu")


def test_divided_layers_do_not_have_chunks(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    divided = in_groups(plan_of(path, (1, 1), "1f1b-flush", 1), 2)

    with pytest.raises(PlanError, match="does not compute a loss in chunks where ranks divide"):
        check_divided(divided)
