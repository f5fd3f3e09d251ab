"""Train a plan from Lightning's Trainer: its callbacks, loggers and progress bar around a
pipeline's steps.

This file is both the model file and the script:

    plan profile lightning_loop.py --batch-size 8
    plan solve --gpus 2 --bandwidth 10Gbps --schedule 1f1b-flush --microbatches 4
    torchrun --nproc-per-node 2 lightning_loop.py plan.json 20
"""

import os
import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


class Pipelined(lightning.LightningModule):
    """Has no weights: the pipeline's stages have them, and their optimizers."""

    def __init__(self, pipeline):
        super().__init__()
        self.automatic_optimization = False  # a step is forward, backward and update
        self.pipeline = pipeline

    def configure_optimizers(self):
        return None

    def training_step(self, batch, number):
        loss = self.pipeline.step(batch)
        if loss is not None:  # under asynchronous schedules the first ones come later
            self.log("loss", loss, prog_bar=True)

    def on_train_epoch_end(self):
        self.pipeline.save_checkpoint("checkpoints")


def main(plan_file, epochs):
    plan = planner.load_plan(plan_file)
    data = samples()
    # Every worker must see the same minibatches, as if it were alone. Lightning tells the sampler
    # the epoch.
    order = DistributedSampler(data, num_replicas=1, rank=0)
    loader = DataLoader(data, plan.minibatch_size, sampler=order)
    with planner.pipeline(plan, __file__) as pipeline:
        first = os.environ["RANK"] == "0"
        # Lightning sees one process without a GPU in each worker: the pipeline places stages and
        # sends batches.
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=epochs,
            logger=False,  # or your logger on the first worker, and False on the others
            enable_progress_bar=first,
            enable_checkpointing=False,
        )
        trainer.fit(Pipelined(pipeline), loader)
        pipeline.save_weights("model.pt")
        if first:
            print(f"loss {pipeline.losses[max(pipeline.losses)]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
