"""A deep kernel of GPyTorch: a network's features, and a variational Gaussian process over inducing
points.
"""

import gpytorch
import torch
from made_up import Samples
from torch import nn

FEATURES, INDUCING, COUNT = 8, 12, 52


class Process(gpytorch.models.ApproximateGP):
    def __init__(self, inducing):
        distribution = gpytorch.variational.CholeskyVariationalDistribution(inducing.shape[0])
        super().__init__(gpytorch.variational.VariationalStrategy(self, inducing, distribution))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, values):
        return gpytorch.distributions.MultivariateNormal(
            self.mean_module(values), self.covar_module(values)
        )


class DeepKernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(FEATURES, 32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.ReLU(),
            nn.Linear(32, 2),
            nn.Tanh(),
        )
        self.process = Process(torch.rand(INDUCING, 2) * 2 - 1)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()
        self.elbo = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=COUNT)

    def forward(self, values, targets):
        return {"loss": -self.elbo(self.process(self.features(values)), targets)}


def build_model():
    model = DeepKernel()
    with torch.no_grad():
        # its first call draws the variational distribution
        model(torch.randn(4, FEATURES), torch.randn(4))
    return model


class Front(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, values, targets):
        return self.layer(values), targets


class Middle(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, state):
        values, targets = state
        return self.layer(values), targets


class Back(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.process, self.elbo = model.process, model.elbo

    def forward(self, state):
        values, targets = state
        return {"loss": -self.elbo(self.process(values), targets)}


def blocks(model):
    first, *rest = model.features
    return [Front(first), *(Middle(layer) for layer in rest), Back(model)]


def example_batch(batch_size):
    return (torch.randn(batch_size, FEATURES), torch.randn(batch_size)), None


def sample(generator):
    values = torch.randn(FEATURES, generator=generator)
    return (values, values.sin().sum()), None


def dataset():
    return Samples(sample, COUNT)


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)
