"""VGG-16 on 32x32 images of handwritten digits, from the package, where `plan quickstart` uses it."""

from planner.demo.vgg16 import build_model, dataset, example_batch, loss, optimizer

__all__ = ["build_model", "dataset", "example_batch", "loss", "optimizer"]
