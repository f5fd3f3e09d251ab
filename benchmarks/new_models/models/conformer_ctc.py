"""A Conformer with CTC: sounds and texts of different lengths."""

import torch
from conformer import Conformer
from made_up import Samples
from torch import nn

FRAMES, BANDS, LETTERS, LENGTH = 48, 20, 16, 6


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(BANDS, 32, 3, 2, padding=1), nn.SiLU())
        self.encoder = Conformer(
            dim=32, depth=3, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=7
        )
        self.head = nn.Linear(32, LETTERS)

    def forward(self, sound):
        return self.head(self.encoder(self.front(sound).transpose(1, 2))).log_softmax(-1)


def build_model():
    return Recogniser()


def example_batch(batch_size):
    letters = torch.randint(1, LETTERS, (batch_size, LENGTH))
    target = {"letters": letters, "times": torch.full((batch_size,), FRAMES // 2)}
    return torch.randn(batch_size, BANDS, FRAMES), target | {
        "lengths": torch.full((batch_size,), LENGTH)
    }


def sample(generator):
    letters = torch.randint(1, LETTERS, (LENGTH,), generator=generator)
    times = torch.randint(FRAMES // 4, FRAMES // 2 + 1, (), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (), generator=generator)
    return torch.randn(BANDS, FRAMES, generator=generator), {
        "letters": letters,
        "times": times,
        "lengths": lengths,
    }


def dataset():
    return Samples(sample, 48)


def loss(output, target):
    return nn.CTCLoss(blank=0, zero_infinity=True)(
        output.transpose(0, 1), target["letters"], target["times"], target["lengths"]
    )


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)
