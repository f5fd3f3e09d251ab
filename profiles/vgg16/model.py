"""VGG-16 on 32x32 images of handwritten digits; the file itself comes with the package, for `plan quickstart`."""

from planner.demo.vgg16 import build_model, dataset, example_batch, loss, optimizer

__all__ = ["build_model", "dataset", "example_batch", "loss", "optimizer"]
