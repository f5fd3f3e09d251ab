"""Other workers of the machine, at work beside a measurement.

Workers on the cores of one machine share its caches and the bandwidth of its memory: each is slower when the others
work too, which a model that is measured with the machine to itself does not show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from planner.errors import InputError, PlannerError, WorkerError
from planner.model.autocast import autocast_dtype, autocast_name
from planner.model.memory_format import lay_out
from planner.model.options import ModuleOptions
from planner.model.spec import TrainingSpec, load_model_file
from planner.model.stage.unsplit import unsplit_loss
from planner.profiler.measured.malloc import keep_freed_pages
from planner.profiler.measured.update import still

_START_S = 600.0  # to build the model and take one step; a very large model needs minutes
_READY = "ready"


def check_processes(processes: int, threads: int, device: torch.device, spec: TrainingSpec) -> None:
    """Refuse a number of workers that this machine has no cores for.

    Raises:
        InputError: for that, for a GPU, and for a model that no other process can load.
    """
    if processes < 1:
        raise InputError(f"processes {processes} is less than 1", hint="give a positive whole number")
    if processes == 1:
        return
    if device.type != "cpu":
        raise InputError(
            f"{processes} processes cannot be measured on '{device}': a GPU is taken to serve one worker",
            hint="leave --processes out",
        )
    cores = len(os.sched_getaffinity(0))
    if processes * threads > cores:
        raise InputError(
            f"{processes} processes of {threads} threads need {processes * threads} cores, and this one has {cores}",
            hint=f"this machine has room for --processes {max(1, cores // threads)}",
        )
    if spec.path is None:
        raise InputError(
            f"the model '{spec.name}' is in this process's memory, where {processes - 1} others cannot load it",
            hint="write it to a model file, or leave processes at 1",
        )


@contextmanager
def at_work(
    spec: TrainingSpec, batch_size: int, others: int, *, threads: int = 1, options: ModuleOptions
) -> Iterator[None]:
    """Within, so many other processes take training steps of the model, each on cores of its own.

    They run the model as it is, uncompiled; they end with the block, or with this process.

    Raises:
        WorkerError: when one cannot be started, or ended before the block did.
    """
    assert spec.path is not None, "check_processes refuses models in memory"
    order = {
        "model": f"{spec.path.resolve()}:{spec.builder}",
        "batch_size": batch_size,
        "threads": threads,
        "autocast": autocast_name(options.autocast),
        "channels_last": options.channels_last,
    }
    with ExitStack() as stack:
        workers = [stack.enter_context(_Worker(json.dumps(order), number)) for number in range(others)]
        for worker in workers:
            worker.wait_until_ready()
        yield
        for worker in workers:
            worker.check()


class _Worker:
    """One process, which ends when its standard input is closed."""

    def __init__(self, order: str, number: int) -> None:
        self._number = number
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys, {__name__} as it; sys.exit(it.main(sys.argv[1]))", order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # it has nothing to lose
        self._process.communicate()

    def wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        alarm = threading.Timer(_START_S, self._process.kill)
        alarm.start()
        try:
            if self._process.stdout.readline().strip() != _READY:
                self._fail()
        finally:
            alarm.cancel()

    def check(self) -> None:
        if self._process.poll() is not None:
            self._fail()

    def _fail(self) -> None:
        _, error = self._process.communicate()
        code = self._process.returncode
        reason = (error.strip().splitlines() or [f"it ended with exit code {code}"])[-1]
        raise WorkerError(
            f"process {self._number + 1} that was to train beside the measured one failed: {reason}",
            hint="is there memory for as many copies of the model? Otherwise give fewer --processes",
        )


def _work(order: str) -> None:
    """Take training steps until standard input is closed, or the parent is gone, which closes it too."""
    parsed = json.loads(order)
    torch.set_num_threads(parsed["threads"])
    options = ModuleOptions(autocast_dtype(parsed["autocast"]), parsed["channels_last"])
    spec = load_model_file(parsed["model"])
    model = spec.build_model()
    batch = spec.example_batch(parsed["batch_size"])
    if options.channels_last:
        lay_out(model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = still(spec.optimizer(parameters))
    told = False
    while True:
        optimizer.zero_grad()
        unsplit_loss(model, spec, batch, options).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if not told:
            sys.stdout.write(f"{_READY}\n")
            sys.stdout.flush()
            told = True


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def main(order: str) -> int:
    """What the other processes run."""
    keep_freed_pages()  # as the workers do
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _work(order)
    except PlannerError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code
    return 0
