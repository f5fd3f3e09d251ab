"""A spiking network of snnTorch: neurons of leaky memory over ten time steps, counted spikes."""

import snntorch as snn
import torch
from made_up import Samples
from snntorch import surrogate
from torch import nn
from torch.nn.functional import cross_entropy

STEPS, CLASSES = 10, 10


class Spiking(nn.Module):
    def __init__(self):
        super().__init__()
        gradient = surrogate.fast_sigmoid(slope=25)
        self.conv1, self.lif1 = nn.Conv2d(1, 8, 5), snn.Leaky(beta=0.9, spike_grad=gradient)
        self.conv2, self.lif2 = nn.Conv2d(8, 16, 5), snn.Leaky(beta=0.9, spike_grad=gradient)
        self.fc, self.lif3 = (
            nn.Linear(16 * 4 * 4, CLASSES),
            snn.Leaky(beta=0.9, spike_grad=gradient),
        )

    def forward(self, images):
        memory1, memory2, memory3 = (
            self.lif1.init_leaky(),
            self.lif2.init_leaky(),
            self.lif3.init_leaky(),
        )
        membranes = []
        for _ in range(STEPS):
            spikes, memory1 = self.lif1(torch.max_pool2d(self.conv1(images), 2), memory1)
            spikes, memory2 = self.lif2(torch.max_pool2d(self.conv2(spikes), 2), memory2)
            spikes, memory3 = self.lif3(self.fc(spikes.flatten(1)), memory3)
            membranes.append(memory3)
        return torch.stack(membranes, 1)


def build_model():
    return Spiking()


class Layer(nn.Module):
    """A layer and its neurons over all time steps; pictures are the same at each."""

    def __init__(self, layer, neurons, *, pooled, first=False, last=False):
        super().__init__()
        self.layer, self.neurons, self.pooled, self.first, self.last = (
            layer,
            neurons,
            pooled,
            first,
            last,
        )

    def forward(self, values):
        memory, returned = self.neurons.init_leaky(), []
        for each in [values] * STEPS if self.first else values.unbind(1):
            current = (
                torch.max_pool2d(self.layer(each), 2)
                if self.pooled
                else self.layer(each.flatten(1))
            )
            spikes, memory = self.neurons(current, memory)
            returned.append(memory if self.last else spikes)
        return torch.stack(returned, 1)


def blocks(model):
    return [
        Layer(model.conv1, model.lif1, pooled=True, first=True),
        Layer(model.conv2, model.lif2, pooled=True),
        Layer(model.fc, model.lif3, pooled=False, last=True),
    ]


def example_batch(batch_size):
    return torch.rand(batch_size, 1, 28, 28), torch.randint(0, CLASSES, (batch_size,))


def sample(generator):
    return torch.rand(1, 28, 28, generator=generator), torch.randint(
        0, CLASSES, (), generator=generator
    )


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    return sum(cross_entropy(membrane, target) for membrane in output.unbind(1))


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=5e-4, betas=(0.9, 0.999))
