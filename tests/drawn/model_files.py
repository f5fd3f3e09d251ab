"""Model files drawn at random over the kinds of things that people write into them.

A file has a body, data, a loss, an optimizer and a schedule of rates, and perhaps hooks, modes and
regions. Each of these axes has a plain choice, its first; most files are odd in one or two ways.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent, indent

ODD_AXES = (1, 2, 2, 3)  # how many may not be plain, drawn evenly of these
SAMPLES = 24  # of the dataset


@dataclass(frozen=True)
class Choice:
    """One way to write a part of a model file.

    Attributes:
        text: of the file, by the place that it belongs to.
        refusable: whether a refusal is as right as a training that equals one process.
        needs: choices of other axes without which this one makes no sense.
    """

    text: Mapping[str, str]
    refusable: bool = False
    needs: Mapping[str, tuple[str, ...]] | None = None


# What a body takes and gives: `classes` are one label per sample, `words` are one per token.
ROWS = """
def inputs(generator):
    return torch.randn(6, generator=generator)
"""
TOKENS = """
def inputs(generator):
    return torch.randint(0, WORDS, (LENGTH,), generator=generator)
"""
CLASS_LABELS = """
def labels(x, generator):
    return torch.randint(0, CLASSES, (), generator=generator)
"""
WORD_LABELS = """
def labels(x, generator):
    return x.roll(-1)
"""

BODIES = {
    "perceptrons": Choice(
        {
            "given": ROWS + CLASS_LABELS,
            "first": "self.first = nn.Linear(6, D)",
            "blocks": "nn.Sequential(nn.Linear(D, D), nn.Tanh())",
            "head": "self.head = nn.Linear(D, CLASSES)",
        }
    ),
    "residual": Choice(
        {
            "given": ROWS + CLASS_LABELS,
            "first": "self.first = nn.Linear(6, D)",
            "blocks": "Residual()",
            "classes": """
                class Residual(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.norm, self.inner = nn.LayerNorm(D), nn.Linear(D, D)

                    def forward(self, x):
                        return x + nn.functional.gelu(self.inner(self.norm(x)))
                """,
            "head": "self.head = nn.Linear(D, CLASSES)",
        }
    ),
    "attention": Choice(
        {
            "given": TOKENS + WORD_LABELS,
            "first": "self.first = nn.Embedding(WORDS, D)",
            "blocks": "Attention()",
            "classes": """
                class Attention(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.norm, self.project = nn.LayerNorm(D), nn.Linear(D, 3 * D)
                        self.out = nn.Linear(D, D)

                    def forward(self, x):
                        q, k, v = self.project(self.norm(x)).chunk(3, -1)
                        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                        return x + self.out(mixed)
                """,
            "head": "self.head = nn.Linear(D, WORDS)",
        }
    ),
}

ROW_BODIES = ("perceptrons", "residual")
WORD_BODIES = ("attention",)

HEADS = {
    "as made": Choice({"after": ""}),
    "zero": Choice({"after": "nn.init.zeros_(self.head.weight)\nnn.init.zeros_(self.head.bias)"}),
}

DATA = {
    "fixed": Choice({"item": ""}),
    "draws with numpy": Choice(
        {
            "item": "x = x + torch.from_numpy(numpy.random.randn(6)).float()\ny = (x.sum() > "
            "0).long()"
        },
        needs={"body": ROW_BODIES},
    ),
    "draws with random": Choice(
        {"item": "x = x * random.uniform(0.5, 2.0)\ny = (x.sum() > 0).long() + 1"},
        needs={"body": ROW_BODIES},
    ),
    "draws with torch": Choice(
        {"item": "x = x + torch.randn(6)\ny = (x.sum() > 0).long()"}, needs={"body": ROW_BODIES}
    ),
    "masks words": Choice(
        {"item": "chosen = torch.rand(LENGTH) < 0.4\ny = x.clone()\nx = x.masked_fill(chosen, 0)"},
        needs={"body": WORD_BODIES},
    ),
    "draws in collate": Choice(
        {
            "functions": """
                def collate(samples):
                    x = torch.stack([x for (x,), _ in samples])
                    y = torch.stack([y for _, y in samples])
                    mixed = 0.7 * x + 0.3 * x[torch.randperm(len(samples))]
                    return (mixed,), y
                """
        },
        needs={"body": ROW_BODIES, "loss": ("mean", "sum", "smoothed", "ignored labels")},
    ),
    "keeps a generator": Choice(
        {
            "start": "self.generator = numpy.random.default_rng(3)",
            "item": "x = x + torch.from_numpy(self.generator.standard_normal(6)).float()",
        },
        refusable=True,
        needs={"body": ROW_BODIES},
    ),
}

_ENTROPY = "nn.functional.cross_entropy"
LOSSES = {
    "mean": Choice({"loss": f"return {_ENTROPY}(flat(output), target.flatten())"}),
    "sum": Choice(
        {"loss": f"return {_ENTROPY}(flat(output), target.flatten(), reduction='sum') / 50"}
    ),
    "smoothed": Choice(
        {"loss": f"return {_ENTROPY}(flat(output), target.flatten(), label_smoothing=0.1)"}
    ),
    "ignored labels": Choice(
        {
            "item": "y = hide(y, index, -100)",
            "loss": f"return {_ENTROPY}(flat(output), target.flatten())",
        },
        refusable=True,
    ),
    "other ignored labels": Choice(
        {
            "item": "y = hide(y, index, -1)",
            "loss": f"return {_ENTROPY}(flat(output), target.flatten(), ignore_index=-1)",
        },
        refusable=True,
    ),
    "ignored labels, weighed": Choice(
        {
            "item": "y = hide(y, index, -100)",
            "loss": f"return {_ENTROPY}(flat(output), target.flatten())",
            "functions": "def loss_weight(target):\n    return (target != -100).sum()",
        },
        refusable=True,  # a part of a batch may have no label at all, and then no loss
    ),
    "focal with ignored labels": Choice(
        {
            "item": "y = hide(y, index, -100)",
            "loss": f"""
                each = {_ENTROPY}(flat(output), target.flatten(), reduction='none')
                kept = target.flatten() != -100
                return ((1 - torch.exp(-each)) ** 2 * each)[kept].sum() / kept.sum().clamp(min=1)
                """,
        },
        refusable=True,
    ),
    "weights of classes": Choice(
        {
            "loss": f"return {_ENTROPY}(flat(output), target.flatten(), torch.arange(1.0, "
            f"output.shape[-1] + 1))"
        },
        refusable=True,
    ),
    "weights of samples": Choice(
        {
            "sample": "(x,), (y, torch.tensor(float(index % 5)))",
            "batch": "(x,), (y, torch.ones(n))",
            "loss": f"""
                labels, weights = target
                each = {_ENTROPY}(flat(output), labels.flatten(), reduction='none')
                each = each.reshape(len(weights), -1).mean(1)
                return (each * weights).sum() / weights.sum().clamp(min=1e-6)
                """,
        },
        refusable=True,
    ),
    "mask of the batch": Choice(
        {
            "sample": "(x,), (y, hide(torch.ones(y.shape), index, 0.0))",
            "batch": "(x,), (y, torch.ones(y.shape))",
            "loss": f"""
                labels, mask = target
                each = {_ENTROPY}(flat(output), labels.flatten(), reduction='none')
                return (each * mask.flatten()).sum() / mask.sum().clamp(min=1)
                """,
        },
        refusable=True,
    ),
    "balance of the batch": Choice(
        {
            "loss": f"""
                shares = flat(output).softmax(-1).mean(0)
                return {_ENTROPY}(flat(output), target.flatten()) + 0.02 * (shares**2).sum()
                """,
        },
        refusable=True,
    ),
    "contrast of the batch": Choice(
        {
            "loss": """
                rows = nn.functional.normalize(output.reshape(len(output), -1), dim=-1)
                alike = rows @ rows.T / 0.2
                return alike.logsumexp(-1).mean() - alike.diagonal().mean()
                """,
        },
        refusable=True,
    ),
    "inside the model": Choice(
        {
            "item": "y = hide(y, index, -1)",
            "arguments": "x, targets",
            "sample": "(x, y), torch.tensor(0.0)",
            "batch": "(x, y), torch.zeros(n)",
            "forward": f"x = {_ENTROPY}(flat(x), targets.flatten(), ignore_index=-1)",
            "loss": "return output",
        },
        refusable=True,
    ),
}

HOOKS = {
    "none": Choice({"forward": ""}),
    "of an activation": Choice(
        {"middle": "if x.requires_grad:\n    x.register_hook(lambda g: -0.5 * g)"}, refusable=True
    ),
    "of a parameter": Choice(
        {"after": "self.head.weight.register_hook(lambda g: g * 0.5)"}, refusable=True
    ),
    "of a forward": Choice(
        {
            "after": "self.blocks[1].register_forward_hook("
            "lambda module, args, output: output.register_hook(lambda g: 2 * g) and None)"
        },
        refusable=True,
    ),
    "of a forward that returns": Choice(
        {
            "after": "self.blocks[1].register_forward_hook(lambda module, args, output: output * "
            "1.5)"
        },
        refusable=True,
    ),
    "of a backward": Choice(
        {
            "after": "self.blocks[1].register_full_backward_hook("
            "lambda module, before, after: tuple(None if g is None else 0.5 * g for g in before))"
        },
        refusable=True,
    ),
    "after accumulation": Choice(
        {
            "after": "self.head.weight.register_post_accumulate_grad_hook(lambda p: "
            "p.grad.clamp_(-0.01, 0.01))"
        },
        refusable=True,
    ),
    "in the loss": Choice(
        {"loss first": "output.register_hook(lambda g: 0.5 * g)"}, refusable=True
    ),
}

MODES = {
    "training": Choice({"built": ""}),
    "frozen encoder": Choice(
        {
            "encoder": "nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D))",
            "built": "net.encoder.requires_grad_(False)\nnet.encoder.eval()",
        }
    ),
    "frozen statistics": Choice(
        {
            "encoder": "nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D))",
            "built": "net.encoder[1].eval()",
        },
        needs={"body": ROW_BODIES},
    ),
    "trained without dropout": Choice(
        {
            "encoder": "nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5))",
            "built": "net.encoder.eval()",
        }
    ),
}

REGIONS = {
    "none": Choice({"forward": ""}),
    "autocast": Choice({"around": "with torch.autocast('cpu', torch.bfloat16):"}),
    "no autocast": Choice({"around": "with torch.autocast('cpu', enabled=False):"}),
    "gradients on": Choice({"around": "with torch.enable_grad():"}),
    "no gradients": Choice(
        {"around encoder": "with torch.no_grad():"}, needs={"mode": ("frozen encoder",)}
    ),
    "recomputed": Choice(
        {"block call": "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"}
    ),
}

OPTIMIZERS = {
    "default": Choice({}),
    "momentum": Choice(
        {"optimizer": "return torch.optim.SGD(parameters, lr=0.2, momentum=0.9, nesterov=True)"}
    ),
    "adam": Choice({"optimizer": "return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)"}),
    "adafactor": Choice(
        {"optimizer": "return torch.optim.Adafactor(parameters, lr=0.05)"}, refusable=True
    ),
    "decay by groups": Choice(
        {
            "parameters": "named_parameters",
            "optimizer": """
                named = list(named_parameters)
                decayed = [p for name, p in named if p.ndim > 1]
                others = [p for name, p in named if p.ndim <= 1]
                groups = [
                    {"params": decayed, "weight_decay": 0.1},
                    {"params": others, "weight_decay": 0.0},
                ]
                return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)
                """,
        }
    ),
    "rates by depth": Choice(
        {
            "parameters": "named_parameters",
            "optimizer": """
                groups = {}
                for name, p in named_parameters:
                    groups.setdefault(
                        name.split(".")[1] if name.startswith("blocks") else name[:4], []
                    ).append(p)
                return torch.optim.SGD(
                    [{"params": ps, "lr": 0.05 * (1 + i)} for i, ps in enumerate(groups.values())]
                )
                """,
        },
        refusable=True,
    ),
    "norm of all": Choice(
        {
            "optimizer": "return Normalised(parameters, lr=0.1)",
            "classes": """
                class Normalised(torch.optim.Optimizer):
                    def __init__(self, parameters, lr):
                        super().__init__(parameters, {"lr": lr})

                    @torch.no_grad()
                    def step(self, closure=None):
                        every = [
                            p for g in self.param_groups for p in g["params"] if p.grad is not None
                        ]
                        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in every]))
                        for group in self.param_groups:
                            for p in group["params"]:
                                if p.grad is not None:
                                    p.sub_(p.grad / norm, alpha=group["lr"])
                """,
        },
        refusable=True,
    ),
    "rate of all": Choice(
        {
            "optimizer": "return Growing(parameters, lr=0.02)",
            "classes": """
                class Growing(torch.optim.Optimizer):
                    def __init__(self, parameters, lr):
                        super().__init__(parameters, {"lr": lr})
                        self.moved = 1.0

                    @torch.no_grad()
                    def step(self, closure=None):
                        for group in self.param_groups:
                            for p in group["params"]:
                                if p.grad is not None:
                                    p.sub_(p.grad, alpha=group["lr"] * self.moved)
                                    self.moved += float(p.grad.norm())
                """,
        },
        refusable=True,
    ),
}

RATES = {
    "constant": Choice({}),
    "step": Choice({"scheduler": "return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)"}),
    "cosine after warm-up": Choice(
        {
            "scheduler": """
                rates = torch.optim.lr_scheduler
                warm = rates.LinearLR(optimizer, 0.2, total_iters=2)
                rest = rates.CosineAnnealingLR(optimizer, 6)
                return rates.SequentialLR(optimizer, [warm, rest], [2])
                """
        }
    ),
    "one per group": Choice(
        {
            "scheduler": """
                factors = [lambda step, i=i: 1 / (1 + step * (i + 1)) for i in range(2)]
                return torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
                """
        },
        refusable=True,
        needs={"optimizer": ("decay by groups",)},
    ),
    "one cycle": Choice(
        {"scheduler": "return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20)"},
        needs={"optimizer": ("momentum", "adam")},
    ),
    "by the loss": Choice(
        {"scheduler": "return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)"},
        refusable=True,
    ),
}

AXES: Mapping[str, Mapping[str, Choice]] = {
    "body": BODIES,
    "head": HEADS,
    "data": DATA,
    "loss": LOSSES,
    "hook": HOOKS,
    "mode": MODES,
    "region": REGIONS,
    "optimizer": OPTIMIZERS,
    "rate": RATES,
}


@dataclass(frozen=True)
class DrawnFile:
    """A model file, and what may be expected of it."""

    seed: int
    names: Mapping[str, str]  # of the choices, by axis
    text: str
    refusable: bool

    @property
    def title(self) -> str:
        """The choices that are not the plain ones."""
        odd = [
            f"{axis} {name}" for axis, name in self.names.items() if name != next(iter(AXES[axis]))
        ]
        return ", ".join(odd) or "plain"


def draw_file(seed: int) -> DrawnFile:
    """Draw a model file; the same for the same seed."""
    generator = random.Random(seed)
    names = _drawn(generator)
    while not all(_makes_sense(AXES[axis][name], names) for axis, name in names.items()):
        names = _drawn(generator)

    choices = [AXES[axis][name] for axis, name in names.items()]
    title = "\n".join(f"{axis}: {name}" for axis, name in names.items())
    return DrawnFile(
        seed=seed,
        names=names,
        text=f'"""Drawn from seed {seed}.\n\n{title}\n"""\n' + _assembled(choices),
        refusable=any(choice.refusable for choice in choices),
    )


def _drawn(generator: random.Random) -> dict[str, str]:
    """Draw a choice of each axis: any body, and plain ones of all others but a few, and of what
    those need.
    """
    names = {axis: next(iter(choices)) for axis, choices in AXES.items()}
    names["body"] = generator.choice(list(BODIES))
    odd = generator.sample([axis for axis in AXES if axis != "body"], generator.choice(ODD_AXES))
    for axis in odd:
        names[axis] = generator.choice(list(AXES[axis]))
        for needed, allowed in (AXES[axis][names[axis]].needs or {}).items():
            if names[needed] not in allowed:
                names[needed] = generator.choice(allowed)
    return names


def _makes_sense(choice: Choice, names: Mapping[str, str]) -> bool:
    return all(names[axis] in allowed for axis, allowed in (choice.needs or {}).items())


def _assembled(choices: list[Choice]) -> str:
    """Return the file's text: what all choices say for each of its places."""
    lines = {
        place: "\n".join(
            dedent(choice.text[place]).strip("\n") for choice in choices if place in choice.text
        )
        for place in _LINES
    }
    expressions = dict(_EXPRESSIONS)
    for choice in choices:
        expressions |= {place: choice.text[place] for place in _EXPRESSIONS if place in choice.text}

    written = _FILE
    written += _OPTIMIZER if lines["optimizer"] else ""
    written += _SCHEDULER if lines["scheduler"] else ""
    for place, text in lines.items():
        written = _filled(written, place, text)
    for place, text in expressions.items():
        written = written.replace(f"<{place}>", text)
    return written


def _filled(written: str, place: str, text: str) -> str:
    """Put lines in place of a line that names them, as far to the right as that."""
    result = []
    for line in written.splitlines():
        if line.strip() != f"<{place}>":
            result.append(line)
        elif text:
            result.append(indent(text, line[: len(line) - len(line.lstrip())]))
    return "\n".join(result) + "\n"


_LINES = (
    "given",
    "classes",
    "functions",
    "first",
    "head",
    "after",
    "middle",
    "forward",
    "built",
    "start",
    "item",
    "loss first",
    "loss",
    "optimizer",
    "scheduler",
)
_EXPRESSIONS = {
    "blocks": "",
    "encoder": "nn.Identity()",
    "arguments": "x",
    "around": "if True:",
    "around encoder": "if True:",
    "block call": "block(x)",
    "sample": "(x,), y",
    "batch": "(x,), y",
    "parameters": "parameters",
}
_FILE = '''
import random

import numpy
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils.data import SequentialSampler

D, WORDS, LENGTH, CLASSES, SAMPLES = 8, 11, 6, 5, 24


def flat(output):
    return output.float().flatten(0, -2)


def hide(y, index, value):
    """Hide the last labels of a sample: how many depends on the sample, and may be all of them."""
    hidden = torch.arange(y.numel()).reshape(y.shape) >= index % (y.numel() + 2)
    return y.masked_fill(hidden, value)


<given>


<classes>


<functions>


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        <first>
        self.encoder = <encoder>
        self.blocks = nn.ModuleList([<blocks> for _ in range(4)])
        <head>
        <after>

    def forward(self, <arguments>):
        x = self.first(x)
        <around encoder>
            x = self.encoder(x)
        <around>
            for block in self.blocks:
                x = <block call>
        <middle>
        x = self.head(x.float())
        <forward>
        return x


def build_model():
    net = Net()
    <built>
    return net


class Samples(torch.utils.data.Dataset):
    def __init__(self):
        self.made = torch.Generator().manual_seed(1)
        self.rows = [(x := inputs(self.made), labels(x, self.made)) for _ in range(SAMPLES)]
        <start>

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = self.rows[index]
        <item>
        return <sample>


def dataset():
    return Samples()


def sampler(microbatch_size, microbatches, seed):
    return SequentialSampler(range(SAMPLES))


def example_batch(n):
    generator = torch.Generator().manual_seed(2)
    rows = [(x := inputs(generator), labels(x, generator)) for _ in range(n)]
    x, y = torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])
    return <batch>


def loss(output, target):
    <loss first>
    <loss>
'''
_OPTIMIZER = """

def optimizer(<parameters>):
    <optimizer>
"""
_SCHEDULER = """

def scheduler(optimizer):
    <scheduler>
"""
