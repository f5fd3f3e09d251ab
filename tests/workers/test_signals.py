"""Signals at every moment of a run: one sentence or none, no traceback, and no folder that
stays.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from planner.executor.worker import launch
from planner.formats.plan import load_plan, save_plan
from planner.workers.job import Job
from tests.cli.in_process import plan
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile

TIMEOUT_S = 200
STEPS = 4

# Sends this process a signal when it imports a module: SIGNALLED is "module signal", and RANK says
# which process.
AT_IMPORT = """
import os, signal, sys

class Signals:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE and os.environ.get("RANK", "") == RANK:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), getattr(signal, SIGNAL))

MODULE, SIGNAL, RANK = (os.environ["SIGNALLED"] + " ").split(" ")[:3]
sys.meta_path.insert(0, Signals())
"""

# At an update, with FAULT in the environment.
FAULTS = """
import os, resource, signal

def on_update(minibatch, loss, metrics):
    if minibatch != 2:
        return
    if os.environ.get("FAULT") == "hangup":
        os.kill(os.getppid(), signal.SIGHUP)
    if os.environ.get("FAULT") == "threads":
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        if os.getuid() == 0:
            os.setuid(65534)  # no limit holds for root
        raise ValueError("no step")
"""

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file, a plan "1-1" for it, and the module that Python imports first."""
    folder = tmp_path_factory.mktemp("signals")
    path = write_model(folder, "convolutional", "sgd", more=FAULTS).rename(folder / "model.py")
    save_plan(make_plan(structural_profile(path, 4), (1, 1)), folder / "plan.json")
    (folder / "first").mkdir()
    (folder / "first" / "sitecustomize.py").write_text(AT_IMPORT, encoding="utf-8")
    return folder


def train(
    folder: Path, *, first: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder / "first"), str(Path.cwd())] if first else [str(Path.cwd())])
    return subprocess.run(
        [sys.executable, "-m", "planner", "train", "model.py", "--steps", str(STEPS)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize("module", ["planner.cli", "planner.options.solving", "pydantic", "torch"])
def test_an_interrupt_while_the_command_imports_leaves_no_traceback(
    folder: Path, module: str
) -> None:
    done = train(folder, first=True, SIGNALLED=f"{module} SIGINT")
    assert done.returncode in (130, -signal.SIGINT), done.stderr
    assert done.stderr in ("", "error: interrupted\n")


@pytest.mark.parametrize(
    ("module", "number", "told"),
    [
        ("pydantic", "SIGINT", "was killed by SIGINT"),
        pytest.param("torch", "SIGINT", "was killed by SIGINT", marks=pytest.mark.slow),
        ("torch", "SIGTERM", "was ended by signal SIGTERM"),
    ],
)
def test_a_worker_that_a_signal_ends_while_it_imports_is_named(
    folder: Path, module: str, number: str, told: str
) -> None:
    done = train(folder, first=True, SIGNALLED=f"{module} {number} 1")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == f"error: worker 1 (stage 1) {told}, last heard of while starting"
    assert len(lines) == 2, done.stderr


@pytest.mark.usefixtures("warm_start")
def test_the_reason_is_told_where_no_thread_can_be_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAULT", "threads")
    done = plan("train", "model.py", "--steps", str(STEPS), cwd=folder)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: on_update() fails at "), done.stderr
    assert lines[0].endswith("ValueError: no step")
    assert len(lines) == 2, done.stderr


def test_a_hangup_that_is_ignored_ends_no_run_and_handlers_are_those_from_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup: a worker sends the signal to the process that launched it, which is this."""
    monkeypatch.setenv("FAULT", "hangup")
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before = [signal.getsignal(number) for number in numbers]
        launch(
            Job(model=str(folder / "model.py"), plan=load_plan(folder / "plan.json"), steps=STEPS)
        )
        assert [signal.getsignal(number) for number in numbers] == before
    finally:
        signal.signal(signal.SIGHUP, handler)
