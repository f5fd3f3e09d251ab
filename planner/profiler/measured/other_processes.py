"""Load the machine's other cores while measuring, and notice other processes that disturb the
measurement.

The workers on one machine share its caches and memory bandwidth, so each is slower while the others
work. A model that is measured alone does not show that.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TextIO

import torch

from planner.errors import InputError, PlannerError, WorkerError
from planner.formats.profile import Disturbance
from planner.model.loss import unsplit_loss
from planner.model.modes import put_in_training
from planner.model.options import ModuleOptions, autocast_dtype, autocast_name
from planner.model.spec import TrainingSpec, load_model_file
from planner.profiler.step.timing import StepTimes
from planner.profiler.step.update import Update
from planner.profiler.this_machine import check_positive, keep_freed_pages
from planner.workers.place import available_cores

_READY = "ready"


def disturbance(whole: Sequence[StepTimes], threads: int) -> Disturbance:
    """Say what disturbed the measurement of the whole step: a first one, and a second one if there
    was one.
    """
    drift = None
    if len(whole) > 1:
        first, second = whole[:2]
        drift = second.median_s() / first.median_s() - 1
    return Disturbance(waited_share=_waited_share(whole, threads), drift=drift)


def _waited_share(whole: Sequence[StepTimes], threads: int) -> float | None:
    """Return the share of the time for which a single thread waited for a core; None for several
    threads, and where a device has no time of threads.
    """
    wall_s = 0.0
    thread_s = 0.0
    for times in whole:
        wall_s += sum(times.forward_s) + sum(times.backward_s)
        thread_s += sum(times.forward_thread_s) + sum(times.backward_thread_s)

    if threads > 1 or not thread_s:
        return None
    return max(0.0, 1 - thread_s / wall_s)


def check_processes(processes: int, threads: int, device: torch.device, spec: TrainingSpec) -> None:
    """Raise InputError for a number of workers that cannot train side by side on this machine."""
    check_positive("processes", processes)
    if processes == 1:
        return
    if device.type != "cpu":
        raise InputError(
            f"`processes={processes}` cannot be measured on '{device}', because a GPU serves one "
            f"worker",
            hint="leave `processes` out, or give `device=cpu`",
        )

    cores = available_cores()
    if processes * threads > cores:
        raise InputError(
            f"{processes} processes of {threads} threads need {processes * threads} cores of this "
            f"machine's {cores}",
            hint=f"it has room for `processes={max(1, cores // threads)}`",
        )

    if spec.path is None:
        raise InputError(
            f"the model '{spec.name}' is in this process's memory, where {processes - 1} others "
            f"cannot load it",
            hint="write it to a model file, or leave `processes` out",
        )


@contextmanager
def contention(
    spec: TrainingSpec, batch_size: int, others: int, *, threads: int = 1, options: ModuleOptions
) -> Iterator[None]:
    """Let `others` more processes train the model within the context, each on cores of its own.

    They run the model uncompiled. They end with the context, or with this process. Raise
    WorkerError when one cannot be started, or ends before the context does.
    """
    if not others:
        yield
        return

    assert spec.path is not None, "check_processes refuses models in memory"
    order = {
        "model": f"{spec.path.resolve()}:{spec.builder}",
        "batch_size": batch_size,
        "threads": threads,
        "autocast": autocast_name(options.autocast),
        "channels_last": options.channels_last,
        "half": autocast_name(options.half),
    }
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(json.dumps(order))) for _ in range(others)]
        for number, worker in enumerate(workers, start=1):
            # Before its first step it builds the model, and contends for little.
            assert worker.stdout is not None
            if worker.stdout.readline().strip() != _READY:
                raise _failure(worker, number)
        yield
        for number, worker in enumerate(workers, start=1):
            if worker.poll() is not None:  # the measurement then was partly without it
                raise _failure(worker, number)


@contextmanager
def _worker(order: str) -> Iterator[subprocess.Popen[str]]:
    """Run one process, which also ends when its standard input is closed."""
    command = [
        sys.executable,
        "-c",
        f"import sys, {__name__} as it; sys.exit(it.main(sys.argv[1]))",
        order,
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()  # it has nothing to lose


def _failure(worker: subprocess.Popen[str], number: int) -> WorkerError:
    _, error = worker.communicate()
    reason = (error.strip().splitlines() or [f"it ended with exit code {worker.returncode}"])[-1]
    return WorkerError(
        f"process {number}, which was to train next to the measured one, failed: {reason}",
        hint="is there memory for as many copies of the model? Otherwise give fewer `processes`",
    )


def _train(order: str, ready: TextIO) -> None:
    """Take training steps until the process is killed; write to `ready` after the first one."""
    parsed = json.loads(order)
    torch.set_num_threads(parsed["threads"])
    half = autocast_dtype(parsed["half"])
    options = ModuleOptions(autocast_dtype(parsed["autocast"]), parsed["channels_last"], half=half)
    spec = load_model_file(parsed["model"])
    model = spec.build_model()
    put_in_training(model)
    batch = spec.example_batch(parsed["batch_size"])
    options.prepare(model)
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    update = Update(spec, parameters)
    for step in count():
        model.zero_grad()
        unsplit_loss(model, spec, batch, options).backward()  # type: ignore[no-untyped-call]
        update()
        if step == 0:
            ready.write(f"{_READY}\n")
            ready.flush()


def main(order: str) -> int:
    """Run one of the other processes."""
    keep_freed_pages()  # as the workers do
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What the model prints is no answer; the measured process prints the same, for people to read.
    ready = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    try:
        _train(order, ready)
    except PlannerError as error:
        sys.stderr.write(f"{error.message}\n")
        return error.exit_code

    return 0


def _end_with_parent() -> None:
    # Standard input ends when the parent closes it, and also when the parent is killed.
    sys.stdin.read()
    os._exit(0)
