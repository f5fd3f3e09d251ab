"""VGG-16 on 32x32 images of handwritten digits: the package's own, which `plan quickstart` uses."""

from planner.demo.vgg16 import build_model, dataset, example_batch, loss, optimizer

__all__ = ["build_model", "dataset", "example_batch", "loss", "optimizer"]
