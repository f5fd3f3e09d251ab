"""Models whose batches vary in length, and what training them in one process computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.executor.run.data import make_batches
from planner.formats.plan import Plan
from planner.formats.profile import LossMean, Profile
from planner.model.batch import Batch
from planner.model.loss import labels_of, loss_of
from planner.model.spec import load_model_file
from planner.schedule.instructions import Unit
from planner.workers.job import Job, TrainResult
from tests.executor.processes import run_jobs
from tests.executor.reference import Weights, delayed_updates, double_buffered, plain_training

SIZE, SEED = 2, 3
# An epoch ends with a minibatch of two samples, so that some of its microbatches have none.
SAMPLES = 50

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
        heads = [
            part.unflatten(-1, (4, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        ]
        x = x + self.out(
            F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
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
    return (inputs,), nn.utils.rnn.pad_sequence(
        [each[1:] for each in samples], batch_first=True, padding_value=-100
    )

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""

# The same with several documents in one row: a word sees those before it in its own document alone.
PACKED = (
    CAUSAL
    + """
class Block(Block):
    def forward(self, x, mask):
        heads = [
            part.unflatten(-1, (4, 4)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        ]
        x = x + self.out(
            F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(x)))

class Net(Net):
    def forward(self, tokens, document):
        number = torch.arange(tokens.shape[1], device=tokens.device)
        first = document != torch.cat([document[:, :1] - 1, document[:, :-1]], 1)
        place = (number - torch.cummax(first * number, 1).values).clamp(max=11)
        mask = (document[:, :, None] == document[:, None, :]) & (number[:, None] >= number)
        x = self.embed(tokens) + self.place(place)
        for block in self.blocks:
            x = block(x, mask.unsqueeze(1))
        return self.head(x)

def lengths():
    return {"words": (3, 36)}

def example_batch(batch_size, words):
    document = torch.arange(words).div(5, rounding_mode="floor").expand(batch_size, -1).contiguous()
    return (torch.randint(1, 23, (batch_size, words)), document), torch.randint(
        1, 23, (batch_size, words)
    )

def sample(number):
    # One to three documents, of which each has labels for all words but its first.
    return [sample_of_one(3 * number + part) for part in range(1 + number % 3)]

def collate(samples):
    pad = lambda rows, value: nn.utils.rnn.pad_sequence(
        [torch.cat(row) for row in rows], True, value
    )
    documents = [
        [torch.full((len(each) - 1,), part) for part, each in enumerate(row)] for row in samples
    ]
    inputs = pad([[each[:-1] for each in row] for row in samples], 0)
    return (inputs, pad(documents, -1)), pad([[each[1:] for each in row] for row in samples], -100)
"""
).replace("def sample(number):", "def sample_of_one(number):", 1)

# An encoder and a decoder, each with a length of its own; labels are padded.
TRANSLATOR = (
    CAUSAL
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(23, 16), nn.Embedding(23, 16)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)]
        )
        self.decoder = nn.ModuleList(
            [nn.TransformerDecoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)]
        )
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
    return (pad(samples, 0)[:, :12], pad([t[:-1] for t in targets], 0)), pad(
        [t[1:] for t in targets], -100
    )
"""
)

GNMT = """
from pathlib import Path
import torch
import torch.nn.functional as F
from planner.model.samplers import BucketSampler
from planner.model.spec import import_file

GNMT8 = import_file(Path("ROOT/profiles/gnmt8/model.py"))
GENERATORS = [torch.Generator().manual_seed(number) for number in range(SAMPLES)]
WORDS = [int(2 + 40 * torch.rand((), generator=each) ** 2) for each in GENERATORS]

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
        return [
            torch.randint(1, 30, (WORDS[index] + more,), generator=generator) for more in (0, 2)
        ]

def dataset():
    return Sentences()

def sampler(microbatch_size, microbatches, seed):
    return BucketSampler(WORDS, microbatch_size, microbatches, seed=seed, pool=4)

def collate(samples):
    pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(
        rows, batch_first=True, padding_value=value
    )
    sources, targets = zip(*samples)
    return (pad(sources, 0), pad([each[:-1] for each in targets], 0)), pad(
        [each[1:] for each in targets], -100
    )

def loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
""".replace("ROOT", str(Path(__file__).resolve().parents[2]))

# Of the library, which computes the loss itself, and of which embedding and head share a weight.
T5 = """
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

def build_model():
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    return T5ForConditionalGeneration(
        T5Config(vocab_size=40, decoder_start_token_id=0, use_cache=False, **sizes)
    )

def lengths():
    return {"source": (3, 20), "target": (3, 12)}

def example_batch(batch_size, source, target):
    words = torch.randint(1, 40, (batch_size, source))
    labels = torch.randint(1, 40, (batch_size, target))
    return (
        (),
        {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels},
        None,
    )

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        source, target = (
            int(torch.randint(*each, (), generator=generator)) for each in ((3, 21), (3, 13))
        )
        return [torch.randint(1, 40, (words,), generator=generator) for words in (source, target)]

def dataset():
    return Sentences()

def collate(samples):
    pad = lambda rows, value: nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
    sources, targets = zip(*samples)
    mask = pad([torch.ones_like(each) for each in sources], 0)
    return (
        (),
        {"input_ids": pad(sources, 0), "attention_mask": mask, "labels": pad(targets, -100)},
        None,
    )

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
"""

MODELS = {"causal": CAUSAL, "packed": PACKED, "translator": TRANSLATOR, "gnmt": GNMT, "t5": T5}


def write(folder: Path, model: str) -> Path:
    path = folder / f"{model}.py"
    path.write_text(MODELS[model].replace("SAMPLES", str(SAMPLES)), encoding="utf-8")
    return path


def by_labels(plan: Plan) -> Plan:
    """The plan whose microbatches count by their labels that are no padding."""
    return plan.model_copy(update={"loss": LossMean(over="labels", ignored=-100)})


def train(folder: Path, jobs: Sequence[Job]) -> list[tuple[TrainResult, Weights]]:
    named = [
        job.model_copy(update={"save_weights": str(folder / f"{n}.pt")})
        for n, job in enumerate(jobs)
    ]
    results = run_jobs(named, folder)
    return [
        (r, torch.load(str(j.save_weights), weights_only=True))
        for r, j in zip(results, named, strict=True)
    ]


class Reference:
    """The model of a file in one process, which knows nothing of stages, captures and messages."""

    def __init__(self, path: Path, plan: Plan, profile: Profile) -> None:
        self.spec, self.plan = load_model_file(str(path)), plan
        torch.manual_seed(SEED)
        self.model = self.spec.build_model()
        self.data = make_batches(self.spec, SIZE, plan.microbatches, SEED)
        stage_of = {
            layer: index for index, stage in enumerate(plan.stages) for layer in stage.layers
        }
        # A weight that several stages have steps as the first of them does, which is the deepest.
        stages = {
            name: stage_of[layer.name]
            for layer in reversed(profile.layers)
            for name in layer.parameters
        }
        names = [name for name, _ in self.model.named_parameters()]
        self.names = [
            [name for name in names if stages[name] == stage] for stage in range(len(plan.stages))
        ]
        self.seen: set[tuple[int, ...]] = set()  # shapes of labels

    def microbatch(self, minibatch: int, number: int) -> Batch | None:
        """A microbatch; None where the last minibatch of an epoch has fewer samples than
        microbatches.
        """
        unit = Unit(minibatch, number)
        if not self.data.size(unit):
            return None
        batch = self.data.batch(unit)
        self.seen.add(tuple(labels(batch).shape))
        return batch

    def loss(self, model: nn.Module, minibatch: int, number: int) -> Tensor:
        """What a microbatch adds to the loss of its minibatch, a mean over all labels that are no
        padding.
        """
        parts = [self.microbatch(minibatch, each) for each in range(self.plan.microbatches)]
        counts = [0 if part is None else int((labels(part) != -100).sum()) for part in parts]
        batch = parts[number]
        if batch is None:
            return torch.stack([parameter.sum() for parameter in model.parameters()]).sum() * 0
        output = model(*batch.args, **batch.kwargs)
        return loss_of(output, batch.target, self.spec.loss) * (counts[number] / sum(counts))

    def train(self, minibatches: int) -> tuple[list[float], Weights]:
        """Train on the plan's data, by the formula of its schedule."""
        plan, make_optimizer, count = self.plan, self.spec.optimizer, self.plan.microbatches
        match plan.schedule.name:
            case "1f1b":
                return delayed_updates(
                    self.model,
                    self.names,
                    plan.replicas,
                    make_optimizer,
                    lambda model, minibatch: self.loss(model, minibatch, 0),
                    minibatches,
                    [stage.in_flight for stage in plan.stages],
                )
            case "2bw":
                return double_buffered(
                    self.model,
                    self.names,
                    plan.replicas,
                    make_optimizer,
                    lambda model, minibatch, number: self.loss(model, minibatch, number) * count,
                    minibatches,
                    count,
                )
            case _:
                return plain_training(
                    self.model,
                    make_optimizer,
                    lambda model, minibatch: [
                        self.loss(model, minibatch, each) * count for each in range(count)
                    ],
                    minibatches,
                )


def labels(batch: Batch) -> Tensor:
    found = labels_of(batch)
    assert found is not None
    return found


def assert_equals_one_process(
    path: Path, profile: Profile, plan: Plan, trained: tuple[TrainResult, Weights], minibatches: int
) -> None:
    """Compare losses and weights to rounding, which is that of float32 where the model is."""
    result, weights = trained
    reference = Reference(path, plan, profile)
    losses, expected = reference.train(minibatches)
    exact = all(tensor.dtype is torch.float64 for tensor in expected.values())
    assert len({shape[1] for shape in reference.seen}) > 2  # or nothing varied
    what = f"{plan.schedule.name} {plan.config}"
    assert [entry.loss for entry in result.losses] == pytest.approx(
        losses, rel=1e-9 if exact else 2e-5
    ), what
    for name, tensor in expected.items():
        rtol, atol = (1e-7, 1e-9) if exact else (1e-3, 1e-5)
        torch.testing.assert_close(
            weights[name], tensor, rtol=rtol, atol=atol, msg=f"{what} {name}"
        )
