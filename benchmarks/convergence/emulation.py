"""Train with late gradients in one process: exactly what the stages of an asynchronous pipeline
compute.

Under `1f1b` with weight stashing stage s of S computes minibatch m, forward and backward, at the
weights after m − (S − 1 − s) updates, and applies the gradient to its newest weights (Narayanan et
al., "PipeDream", SOSP'19, section 3.3). Under `2bw` all stages compute it at the weights before the
last update (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML'21, section
3.1). One process keeps those older weights, and puts them in place for the forward and the
backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.data import DataLoader, Dataset

from planner.executor.run.data import make_batches
from planner.formats.names import CODECS, Codec, CodecName
from planner.model.spec import TrainingSpec, load_model_file
from planner.schedule.instructions import Unit
from planner.workers.coding import coding_of


def lateness(schedule: str, stages: int) -> list[int]:
    """Return how many updates late each stage's gradients are under "1f1b", "2bw" or
    "synchronous".
    """
    late = {
        "synchronous": [0] * stages,
        "2bw": [1] * stages,
        "1f1b": list(range(stages - 1, -1, -1)),
    }
    return late[schedule]


class LateWeights:
    """The weights of each stage after the last updates, and the older ones among them that a
    minibatch is to use.

    Args:
        stages: the parameters of each.
        late: how many updates late the gradients of each are.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Parameter]], late: Sequence[int]) -> None:
        self._stages = stages
        self._older: list[deque[list[Tensor]]] = [deque(maxlen=max(updates, 1)) for updates in late]
        self._late = late
        self._newest: list[list[Tensor]] = []

    def put_older(self) -> None:
        """Give every stage the weights that its next minibatch is computed at."""
        self._newest = [[parameter.data for parameter in stage] for stage in self._stages]
        for stage, older, late in zip(self._stages, self._older, self._late, strict=True):
            if late and older:
                for parameter, data in zip(stage, older[0], strict=True):
                    parameter.data = data

    def put_newest(self) -> None:
        """Give every stage its newest weights, and keep a copy of them, because they are about to
        be updated.
        """
        for stage, older, newest, late in zip(
            self._stages, self._older, self._newest, self._late, strict=True
        ):
            for parameter, data in zip(stage, newest, strict=True):
                parameter.data = data
            if late:
                older.append([data.clone() for data in newest])


def train(
    module: ModuleType,
    minibatches: int,
    seed: int,
    observe: Callable[[int, nn.Module, float], object],
    *,
    builder: str = "build_model",
    late: Sequence[int] = (),
    start: int = 0,
    compress: CodecName = "none",
    clip: float | None = None,
    late_lr: float = 0.0,
) -> nn.Module:
    """Train a model file's model in one process, on the workers' minibatches, and return it.

    Args:
        module: the model file; with `late`, its `stage_of` says where parameters are.
        minibatches: how many.
        seed: of the first weights and of the order of the data.
        observe: is called after each minibatch with the number of them that are done, the model and
            the loss.
        builder: which function makes the model.
        late: how many updates late the gradients of each stage are; nothing for one process.
        start: minibatches at the beginning whose gradients are not late.
        compress: what becomes of the values between the model's `blocks`, and of their gradients.
        clip: `--clip-grad-norm`: of each stage's gradients if any are late, else of all together.
        late_lr: `--late-lr`.
    """
    file = load_model_file(f"{module.__file__}:{builder}")
    torch.manual_seed(seed)
    model = file.build_model()
    batches = make_batches(file, module.MINIBATCH, 1, seed, drop_last=True)
    if compress != "none":
        for block in list(model.get_submodule("blocks").children())[:-1]:
            block.register_forward_hook(
                lambda *call: _sent(call[-1], CODECS[compress]) if model.training else None
            )
    late = late if any(late) else [0]
    named: list[dict[str, nn.Parameter]] = [{} for _ in late]
    for name, parameter in model.named_parameters():
        named[module.stage_of(name, len(late)) if len(late) > 1 else 0][name] = parameter
    shares = [1 / (1 + late_lr * updates) for updates in late]
    optimizers = [_Optimizer(file, *each) for each in zip(named, shares, strict=True)]
    weights = LateWeights([list(stage.values()) for stage in named], late)
    for minibatch in range(minibatches):
        batch = batches.batch(Unit(minibatch))
        model.zero_grad()
        if minibatch >= start:
            weights.put_older()
        loss = module.loss(model(*batch.args), batch.target)
        torch.autograd.backward(loss)
        if minibatch >= start:
            weights.put_newest()
        for optimizer in optimizers:
            optimizer.step(clip)
        observe(minibatch + 1, model, float(loss.detach()))
    return model


class _Optimizer:
    """A stage's optimizer with its scheduler, at a share of the learning rate."""

    def __init__(self, spec: TrainingSpec, stage: dict[str, nn.Parameter], share: float) -> None:
        self._parameters = list(stage.values())
        self._optimizer = spec.optimizer(stage)
        for group in self._optimizer.param_groups:
            group["lr"] *= share
        scheduler = spec.scheduler(self._optimizer)
        assert scheduler is not None
        self._scheduler = scheduler

    def step(self, clip: float | None) -> None:
        """Clip the gradients and update, and follow the schedule."""
        if clip is not None:
            nn.utils.clip_grad_norm_(self._parameters, clip)
        self._optimizer.step()
        self._scheduler.step()


def evaluate(
    module: ModuleType, model: nn.Module, data: Dataset[object]
) -> tuple[float, float | None]:
    """Return the mean loss, and the accuracy if the module has metrics."""
    loss, right, count = 0.0, 0.0, 0
    with torch.no_grad():
        for inputs, target in DataLoader(data, 256):
            output = model.eval()(inputs)
            loss += float(module.loss(output, target)) * len(inputs)
            right += (
                float(module.metrics(output, target)["accuracy"]) * len(inputs)
                if hasattr(module, "metrics")
                else 0
            )
            count += len(inputs)
    model.train()
    return loss / count, right / count if hasattr(module, "metrics") else None


class _Sent(torch.autograd.Function):
    """A value that crosses a link, and whose gradient comes back over it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, codec: Codec) -> Tensor:
        """Code and decode the value."""
        ctx.codec = codec
        return _through(value, codec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Code and decode the gradient."""
        return _through(gradient, ctx.codec), None


def _sent(value: Tensor, codec: Codec) -> Tensor:
    return _Sent.apply(value, codec)  # type: ignore[no-untyped-call, no-any-return]


def _through(value: Tensor, codec: Codec) -> Tensor:
    """Write a value as a message has it, and read it again."""
    coding, size = (
        coding_of(codec, value.nbytes, value.dtype),
        codec.size_bytes(value.nbytes, value.itemsize),
    )
    place = coding.place(torch.empty(size, dtype=torch.uint8), 0, value.shape)
    coding.write(place, value)
    return coding.read(place, value.dtype, value.shape)
