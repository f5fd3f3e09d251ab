"""Train a plan with accelerate around the loop: its launcher, trackers and prints.

This file is both the model file and the script:

    plan profile accelerate_loop.py --batch-size 8
    plan solve --gpus 2 --bandwidth 10Gbps --schedule 1f1b-flush --microbatches 4
    accelerate launch --multi_gpu --num_processes 2 accelerate_loop.py plan.json 20
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner


def build_model():
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
    )


def example_batch(batch_size):
    return torch.randn(batch_size, 6), torch.randint(0, 3, (batch_size,))


def loss(output, target):
    return nn.functional.cross_entropy(output, target)


def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def samples():
    """Make up data: the class is the largest of three sums."""
    inputs = torch.randn(256, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs[:, :3] + inputs[:, 3:]).argmax(1))


def main(plan_file, epochs, tracker=None):
    plan = planner.load_plan(plan_file)
    accelerator = Accelerator(log_with=tracker, project_dir="logs")
    if tracker is not None:
        accelerator.init_trackers("pipelines")
    with planner.pipeline(plan, __file__) as pipeline:
        for epoch in range(epochs):
            # Not prepared: every worker must see the same minibatches.
            order = torch.Generator().manual_seed(epoch)
            for inputs, classes in DataLoader(
                samples(), plan.minibatch_size, shuffle=True, generator=order
            ):
                value = pipeline.step((inputs, classes))
                accelerator.log({"loss": value}, step=pipeline.minibatches)
            accelerator.print(f"epoch {epoch}: loss {value:.6f}")
        pipeline.save_weights("model.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
