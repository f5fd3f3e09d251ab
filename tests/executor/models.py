"""Small model files that the executor's tests write to a folder and train."""

from __future__ import annotations

from pathlib import Path

OPTIMIZERS = {
    "sgd": "torch.optim.SGD(parameters, lr=0.05)",
    "momentum": "torch.optim.SGD(parameters, lr=0.02, momentum=0.9, weight_decay=0.01)",
    "adamw": "torch.optim.AdamW(parameters, lr=0.01)",
}

CONVOLUTIONAL = '''
import torch
from torch import nn

class Block(nn.Module):
    """Convolution, BatchNorm, in-place ReLU, dropout, and a skip around them."""

    def __init__(self, channels):
        super().__init__()
        # No bias: BatchNorm removes it, and its gradient would be rounding noise, which AdamW
        # blows up.
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.relu(self.norm(self.conv(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.blocks = nn.Sequential(Block(6), Block(6), Block(6))
        self.head = nn.Linear(6 * 8 * 8, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).flatten(1))

def build_model():
    return Net()

def example_batch(batch_size):
    return (torch.randn(batch_size, 1, 8, 8),), torch.randint(0, 10, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return OPTIMIZER
'''

# A value with consumers in several stages, an integer value that crosses cuts, tied weights inside
# the last layers.
LANGUAGE = '''
import torch
from torch import nn

class Net(nn.Module):
    """Every block sees the embedding (a skip over all cuts), and the mask is a boolean value
    without gradient.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList([nn.Linear(32, 16) for _ in range(4)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 19)

    def forward(self, tokens, scale):
        first = self.embed(tokens)
        mask = (tokens % 3 == 0).unsqueeze(-1)
        # Each stage makes them itself.
        places = torch.arange(tokens.shape[1], device=tokens.device)[:, None] % 2
        x = first
        for block in self.blocks:
            h = torch.tanh(block(torch.cat([x, first], -1)) + places)
            x = h.masked_fill(mask, 0.5) * scale[:, None, None]
        return self.head(self.norm(x))

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 19, (batch_size, 7))
    return (tokens,), {"scale": torch.rand(batch_size) + 0.5}, tokens.roll(-1, 1)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return OPTIMIZER
'''

# No tracer can capture this, so the file names its blocks. A tuple crosses the cuts, with an
# integer tensor in it.
BLOCKS = '''
import torch
from torch import nn

class Gate(nn.Module):
    """Its control flow depends on the values of its input."""

    def __init__(self):
        super().__init__()
        self.positive, self.negative = nn.Linear(12, 12), nn.Linear(12, 12)
        self.norm = nn.BatchNorm1d(12, affine=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, both):
        x, calls = both
        either, other = self.positive, self.negative
        rows = [other(either(row)) if row.mean() > 0 else either(other(row)) for row in x]
        gated = torch.tanh(torch.stack(rows)) if rows else x
        return x + self.drop(self.norm(gated)), calls + 1

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 12)

    def forward(self, x):
        return self.linear(x), torch.zeros(len(x), dtype=torch.long)

class Head(nn.Linear):
    def forward(self, both):
        return super().forward(both[0] * (both[1] > 0)[:, None])

class Net(nn.Sequential):
    pass

def build_model():
    return Net(First(), Gate(), Gate(), Gate(), Head(12, 4))

def blocks(model):
    return list(model)

def example_batch(batch_size):
    return (torch.randn(batch_size, 6),), torch.randint(0, 4, (batch_size,))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(parameters):
    return OPTIMIZER
'''

# Appended to a model file: the samples of one example batch.
DATASET = """
from torch.utils.data import Dataset

class Samples(Dataset):
    def __init__(self, count, seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.batch, self.count = example_batch(count), count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.utils._pytree.tree_map(lambda leaf: leaf[index], self.batch)

def dataset():
    return Samples(SAMPLES, 11)
"""

# Attention with fewer key-value heads and dropout of its own, dropout within and outside of what
# ranks divide, and an embedding and a head that they divide by the vocabulary.
ATTENTION = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value = (
            nn.Linear(16, 16),
            nn.Linear(16, 8),
            nn.Linear(16, 8, bias=False),
        )
        self.out = nn.Linear(16, 16)
        self.up, self.gate, self.down = (
            nn.Linear(16, 24),
            nn.Linear(16, 24, bias=False),
            nn.Linear(24, 16),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        h = self.before(x)
        q, k, v = (
            made.unflatten(-1, (-1, 4)).transpose(1, 2)
            for made in (self.query(h), self.key(h), self.value(h))
        )
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(a.transpose(1, 2).flatten(2)))
        h = self.between(x)
        return x + self.drop(self.down(self.drop(F.silu(self.gate(h)) * self.up(h))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

def build_model():
    return Net().double()

def tensor_parallel_plan():
    columns, rows = ("query", "key", "value", "up", "gate"), ("out", "down")
    plan = {
        f"blocks.*.{name}": style
        for names, style in ((columns, "colwise"), (rows, "rowwise"))
        for name in names
    }
    return plan | {"embed": "embedding_rowwise", "head": "colwise_gather_output"}

def example_batch(batch_size):
    tokens = torch.randint(0, 20, (batch_size, 8))
    return (tokens,), tokens.roll(-1, 1)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return OPTIMIZER
"""

# The same with query, key and value from one product, taken apart as in nanoGPT, as in timm, and
# with fewer key-value heads; what ranks divide is found.
PACKED = (
    ATTENTION
    + """
class Block(Block):
    made = 0

    def __init__(self):
        super().__init__()
        self.way, Block.made = Block.made % 3, Block.made + 1
        self.qkv = nn.Linear(16, 48 if self.way < 2 else 32)
        del self.query, self.key, self.value

    def forward(self, x):
        qkv = self.qkv(self.before(x))
        heads = lambda made: made.view(*x.shape[:2], made.shape[2] // 4, 4).transpose(1, 2)
        if self.way == 0:
            q, k, v = map(heads, qkv.split(16, dim=2))
        elif self.way == 1:
            q, k, v = qkv.reshape(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = heads(qkv[..., :16]), heads(qkv[..., 16:24]), heads(qkv[..., 24:])
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(a.transpose(1, 2).reshape(x.shape)))
        h = self.between(x)
        return x + self.drop(self.down(self.drop(F.silu(self.gate(h)) * self.up(h))))

class Net(Net):
    def __init__(self):
        super().__init__()
        self.blocks.append(Block())

del tensor_parallel_plan
"""
)

# The same with products of flattened tokens, as in GPT-2 of transformers, and norms by the formula,
# as in its Llama.
FLATTENED = (
    ATTENTION
    + """
class Product(nn.Module):
    def __init__(self, inputs, outputs, bias=True):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.randn(outputs) / 4),
        )

    def forward(self, x):
        made = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return made.view(*x.shape[:-1], made.shape[-1])

class Norm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

class Block(Block):
    def __init__(self):
        super().__init__()
        self.before, self.between = Norm(16), Norm(16)
        for name, made in list(self.named_children()):
            if isinstance(made, nn.Linear):
                setattr(self, name, Product(made.in_features, made.out_features))

class Net(Net):
    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(1, 8, 16) / 4)
        self.embed.register_forward_hook(lambda module, given, made: made + self.place)
"""
)

# The same with experts, of which each token goes to two. Grouped products are captured in bfloat16
# alone. The second block drops values between them.
EXPERTS = (
    ATTENTION
    + """
class Experts(nn.Module):
    def __init__(self, count, share):
        super().__init__()
        self.router = nn.Linear(16, count, bias=False)
        self.both = nn.Parameter(torch.randn(count, 48, 16) / 4)
        self.down = nn.Parameter(torch.randn(count, 16, 24) / 4)
        self.count, self.drop = count, nn.Dropout(share)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.flatten().argsort(stable=True)
        rows = tokens[order // 2]
        ends = (
            (chosen.flatten() == torch.arange(self.count, device=x.device)[:, None])
            .sum(1)
            .cumsum(0)
            .int()
        )
        both, down = self.both.bfloat16().transpose(1, 2), self.down.transpose(1, 2).bfloat16()
        gate, up = F.grouped_mm(rows.bfloat16(), both, offs=ends).chunk(2, -1)
        made = F.grouped_mm(self.drop(F.silu(gate) * up), down, offs=ends)
        made = made.float() * weights.flatten()[order][:, None]
        return made[order.argsort()].view(-1, 2, 16).sum(1).view(x.shape)

class Block(Block):
    made = 0

    def __init__(self):
        super().__init__()
        self.experts, Block.made = Experts(4, 0.1 * (Block.made % 2)), Block.made + 1
        del self.up, self.gate, self.down

    def forward(self, x):
        h = self.before(x)
        q, k, v = (
            made.unflatten(-1, (-1, 4)).transpose(1, 2)
            for made in (self.query(h), self.key(h), self.value(h))
        )
        a = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True, enable_gqa=True)
        x = x + self.drop(self.out(a.transpose(1, 2).flatten(2)))
        return x + self.experts(self.between(x))

def build_model():
    return Net()

def tensor_parallel_plan(found=tensor_parallel_plan):
    return found() | {f"blocks.*.experts.{name}": "grouped_gemm" for name in ("both", "down")}
"""
)

# Appended to a model file with a dataset: what to evaluate on, and how.
EVALUATION = """
def evaluation_dataset():
    return Samples(10, 12)

def metrics(output, target):
    classes = output.shape[-1]
    right = output.reshape(-1, classes).argmax(1) == target.reshape(-1)
    return {"accuracy": right.float().mean(), "largest": output.abs().mean().item()}
"""

# The head shares the embedding's weight, and all blocks share that of their first layer; COPIES
# gives each its own.
TIED = """
import copy
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(19, 16)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(4)]
        )
        self.drop = nn.Dropout(0.2)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 19, bias=False)
        self.head.weight = self.embed.weight
        for block in self.blocks[1:]:
            block[0].weight = self.blocks[0][0].weight
        if COPIES:
            self.head.weight = copy.deepcopy(self.embed.weight)
            for block in self.blocks[1:]:
                block[0].weight = copy.deepcopy(self.blocks[0][0].weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + self.drop(block(x))
        return self.head(self.norm(x))

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 19, (batch_size, 7))
    return (tokens,), tokens.roll(-1, 1)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return OPTIMIZER
"""

MODELS = {"convolutional": CONVOLUTIONAL, "language": LANGUAGE, "blocks": BLOCKS}
# GPT-2, whose head shares the embedding's weight.
GPT2 = """
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=19, n_positions=8, n_embd=16, n_layer=3, n_head=2,
            attn_implementation="eager", use_cache=False
        )
        self.gpt = GPT2LMHeadModel(config)

    def forward(self, tokens):
        return self.gpt(tokens).logits

def build_model():
    return Net()

def example_batch(batch_size):
    tokens = torch.randint(0, 19, (batch_size, 8))
    return (tokens,), tokens.roll(-1, 1)

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def optimizer(parameters):
    return OPTIMIZER
"""

SHARED_HEAD = """
class Net(Net):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight
"""
MIXTRAL = """
import torch
from transformers import MixtralConfig, MixtralForCausalLM

def build_model():
    config = MixtralConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, use_cache=False
    )
    return MixtralForCausalLM(config)

def example_batch(batch_size):
    tokens = torch.randint(0, 20, (batch_size, 8))
    return (), {"input_ids": tokens, "labels": tokens}, None

def optimizer(parameters):
    return OPTIMIZER
"""
DIVIDED = {
    "attention": ATTENTION,
    "packed": PACKED,
    "flattened": FLATTENED,
    "tied head": PACKED + SHARED_HEAD,
    "experts": EXPERTS,
    "experts alone": EXPERTS + "\ndel tensor_parallel_plan\n",
    "mixtral": MIXTRAL,
}
SHARING = {
    "tied": TIED.replace("COPIES", "False"),
    "copies": TIED.replace("COPIES", "True"),
    "gpt2": GPT2,
}


def write_model(
    folder: Path, model: str, optimizer: str, *, samples: int | None = None, more: str = ""
) -> Path:
    """Write the model file, with a dataset of so many samples and `more` source, and return its
    path.
    """
    path = folder / f"{model}_{optimizer}.py"
    source = (MODELS | SHARING | DIVIDED)[model].replace("OPTIMIZER", OPTIMIZERS[optimizer])
    if samples is not None:
        source += DATASET.replace("SAMPLES", str(samples))
    path.write_text(source + more, encoding="utf-8")
    return path
