"""An actor and a critic on one trunk: two outputs, and a loss of three parts with a detached
advantage.
"""

import torch
from made_up import Samples
from torch import nn
from torch.distributions import Categorical

ACTIONS = 6


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 16, 4, 2),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.Tanh(),
        )
        self.actor = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, ACTIONS))
        self.critic = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, screens):
        seen = self.trunk(screens)
        return {"logits": self.actor(seen), "value": self.critic(seen).squeeze(-1)}


def build_model():
    return ActorCritic()


def example_batch(batch_size):
    actions, returns = torch.randint(0, ACTIONS, (batch_size,)), torch.randn(batch_size)
    return torch.randn(batch_size, 4, 14, 14), {"actions": actions, "returns": returns}


def sample(generator):
    actions, returns = (
        torch.randint(0, ACTIONS, (), generator=generator),
        torch.randn((), generator=generator),
    )
    return torch.randn(4, 14, 14, generator=generator), {"actions": actions, "returns": returns}


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    policy, value = Categorical(logits=output["logits"], validate_args=False), output["value"]
    advantage = (target["returns"] - value).detach()
    gain = policy.log_prob(target["actions"]) * advantage
    return (
        -gain.mean()
        + 0.5 * (target["returns"] - value).square().mean()
        - 0.01 * policy.entropy().mean()
    )


def optimizer(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)
