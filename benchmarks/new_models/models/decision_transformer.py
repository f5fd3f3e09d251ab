"""The Decision Transformer: returns, states and actions in turn. The loss is over the actions
before the end.
"""

import torch
from made_up import Samples
from torch.optim.lr_scheduler import LambdaLR
from transformers import DecisionTransformerConfig, DecisionTransformerModel

STATES, ACTIONS, LENGTH = 11, 3, 8


def build_model():
    return DecisionTransformerModel(
        DecisionTransformerConfig(
            state_dim=STATES, act_dim=ACTIONS, hidden_size=32, max_ep_len=64, n_layer=3, n_head=2,
            n_positions=3 * LENGTH, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, vocab_size=1,
        )
    )  # fmt: skip


def arguments(states, actions, returns, mask):
    times = torch.arange(LENGTH).expand(*states.shape[:-1])
    return {
        "states": states,
        "actions": actions,
        "rewards": returns,
        "returns_to_go": returns,
        "timesteps": times.contiguous(),
        "attention_mask": mask,
    }


def example_batch(batch_size):
    states, actions = (torch.randn(batch_size, LENGTH, size) for size in (STATES, ACTIONS))
    mask = torch.ones(batch_size, LENGTH, dtype=torch.long)
    returns = torch.randn(batch_size, LENGTH, 1)
    return (), arguments(states, actions, returns, mask), (actions, mask)


def sample(generator):
    states, actions = (torch.randn(LENGTH, size, generator=generator) for size in (STATES, ACTIONS))
    used = int(torch.randint(2, LENGTH + 1, (), generator=generator))
    mask = (torch.arange(LENGTH) >= LENGTH - used).long()
    returns = torch.randn(LENGTH, 1, generator=generator)
    return (), arguments(states, actions, returns, mask), (actions, mask)


def dataset():
    return Samples(sample, 52)


def loss(output, target):
    actions, mask = target
    predicted = output.action_preds.reshape(-1, ACTIONS)[mask.reshape(-1) > 0]
    return torch.mean((predicted - actions.reshape(-1, ACTIONS)[mask.reshape(-1) > 0]) ** 2)


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4)


def scheduler(optimizer):
    return LambdaLR(optimizer, lambda steps: min((steps + 1) / 4, 1))
