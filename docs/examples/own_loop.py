"""Train a plan with a loop of your own: DataLoader, learning rates, evaluation, early stopping,
checkpoints.

This file is both the model file and the script:

    plan profile own_loop.py --batch-size 8
    plan solve --gpus 2 --bandwidth 10Gbps --schedule 1f1b-flush --microbatches 4
    torchrun --nproc-per-node 2 own_loop.py plan.json 20

Stop it and start it again, with this plan or another one: it continues from its newest checkpoint.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import planner

CHECKPOINTS = Path("checkpoints")
PATIENCE = 3  # epochs without progress after which to stop


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


def metrics(output, target):
    return {"accuracy": (output.argmax(1) == target).float().mean()}


def samples(seed, count):
    """Make up data: the class is the largest of three sums."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, (inputs[:, :3] + inputs[:, 3:]).argmax(1))


def main(plan_file, epochs):
    plan = planner.load_plan(plan_file)
    training, validation = samples(seed=1, count=256), samples(seed=2, count=64)
    with planner.pipeline(plan, __file__, evaluates=True) as pipeline:
        done = pipeline.load_checkpoint(CHECKPOINTS) if CHECKPOINTS.exists() else 0
        best, waited = float("inf"), 0
        per_epoch = -(-len(training) // plan.minibatch_size)
        for epoch in range(done // per_epoch, epochs):
            pipeline.learning_rate = 0.1 * 0.9**epoch
            # Every worker must see the same minibatches: the order depends on the epoch alone.
            order = torch.Generator().manual_seed(epoch)
            for inputs, classes in DataLoader(
                training, plan.minibatch_size, shuffle=True, generator=order
            ):
                pipeline.step((inputs, classes))
            found = pipeline.evaluate(DataLoader(validation, plan.microbatch_size))
            pipeline.save_checkpoint(CHECKPOINTS)
            if os.environ["RANK"] == "0":
                newest = pipeline.losses[max(pipeline.losses)]
                print(
                    f"epoch {epoch}: loss {newest:.4f}, validation {found.loss:.4f}, "
                    f"{found.metrics['accuracy']:.0%}"
                )
            waited = 0 if found.loss < best else waited + 1
            best = min(best, found.loss)
            if waited == PATIENCE:
                break
        pipeline.save_weights("model.pt")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
