"""The callbacks of a PipelineTrainer, which see a model and an optimizer that do not train.

The stages have the weights and the optimizers. What callbacks change of the model that they are
handed would be lost without a word, so it is refused, and so is any use of the optimizer.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from transformers.trainer_callback import CallbackHandler, TrainerControl

from planner.errors import InputError


class PipelineCallbacks(CallbackHandler):  # type: ignore[misc]  # its types are not checked
    """Calls the callbacks of `handler`, and raises InputError where they change a parameter.

    Args:
        handler: as Trainer makes it.
    """

    def __init__(self, handler: CallbackHandler) -> None:
        super().__init__(
            handler.callbacks,
            handler.model,
            handler.processing_class,
            handler.optimizer,
            handler.lr_scheduler,
        )
        self._trained: list[_Parameter] = []

    def watch(self, model: nn.Module) -> None:
        """Raise InputError from now on where an event changes the parameters of `model`."""
        self._trained = [_Parameter(name, each) for name, each in model.named_parameters()]

    def hide_optimizer(self) -> None:
        """Hand callbacks an optimizer and a scheduler that raise InputError when they are used."""
        self.optimizer = _OfStages("optimizer")
        self.lr_scheduler = _OfStages("lr_scheduler")

    def call_event(self, event: str, *given: Any, **others: Any) -> TrainerControl:
        """Call this event of all callbacks."""
        control = super().call_event(event, *given, **others)
        if self._trained:
            parameters = dict(self.model.named_parameters())
            for each in self._trained:
                each.check(parameters.get(each.name), event)

        return control


class _Parameter:
    """A parameter as it was when the stages were made."""

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self._parameter = parameter
        self._requires_grad = parameter.requires_grad
        self._version = parameter._version

    def check(self, now: nn.Parameter | None, event: str) -> None:
        """Raise InputError where the parameter is another one or has changed."""
        if now is self._parameter and now.requires_grad != self._requires_grad:
            raise InputError(
                f"'{self.name}' has requires_grad={now.requires_grad} after {event}() of the "
                f"callbacks, and the stages were made with {self._requires_grad}",
                hint="set requires_grad before train() and evaluate(), for the whole training",
            )

        if now is not self._parameter or now._version != self._version:
            raise InputError(
                f"'{self.name}' has changed after {event}() of the callbacks, and the stages have "
                f"weights of their own",
                hint="change weights before train() and evaluate(), or in a loop of your own: "
                "docs/guides/own-loop.md",
            )


class _OfStages:
    """Stands for what each stage has one of."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself asks of any object
            raise AttributeError(name)
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise InputError(
            f"a callback uses {self._name}.{name}, and each stage of a pipeline has its own "
            f"{self._name}, in its worker",
            hint="read learning_rate in on_log(), and set rates with lr_scheduler_type",
        )
