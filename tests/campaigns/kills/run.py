"""Kill or stop the workers of a training run at random moments, and check that it kept its
promises.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # exported by a star import

from tests.campaigns.kills.plans import MODEL, write_plan
from tests.campaigns.kills.workers import minibatch_of, store_of, workers_of

ROOT = Path(__file__).parents[3]
STEPS = 150
EVERY = 20  # minibatches between checkpoints
HANG_TIMEOUT_S = 8.0
GIVE_UP_S = 900.0  # for a whole run, on a machine that is also otherwise busy
# of the kills: at random times after the workers start, whatever they are doing
STARTING_SHARE = 0.25
STARTING_S = 8.0
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@dataclass
class Kill:
    """One worker that was killed or stopped, and the consequence."""

    config: str
    rank: int
    signal: str
    activity: str  # what the worker was doing
    named: bool = False  # whether the run reported it, with rank and cause
    told_s: float | None = None  # until the run reported it
    went_on_from: int | None = None  # minibatch of the checkpoint


@dataclass
class Outcome:
    """A run and all kills in it."""

    kills: list[Kill] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # broken promises


def reference(config: str, schedule: str, folder: Path) -> dict[str, Any]:
    """Train without kills, draining the pipeline at the same minibatches; return the result with
    the weights.
    """
    command = _command(config, schedule, folder, folder / "reference")
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def killed(
    config: str,
    schedule: str,
    folder: Path,
    expected: dict[str, Any],
    kills: int,
    draw: random.Random,
) -> Outcome:
    """Train with up to `kills` kills, and compare with the run without.

    Args:
        config: replicas per stage, "2-1".
        schedule: of the plan.
        folder: of the plans.
        expected: result of `reference`.
        kills: at most; the run may end earlier.
        draw: random choice of rank, signal and moment.
    """
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="kills-", dir=folder) as name:
        own = Path(name)
        ever: set[int] = set()
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            process = subprocess.Popen(
                [*_command(config, schedule, folder, own), "--resume"],
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=_environment(),
            )  # fmt: skip
            told: list[tuple[float, str]] = []
            reader = threading.Thread(target=_read, args=(process, told))
            reader.start()
            watcher = threading.Thread(target=_note_children, args=(process, ever))
            watcher.start()
            kill = _kill(process, config, draw) if len(outcome.kills) < kills else None
            began = time.monotonic()
            try:
                out = _finish(process, deadline)
            except subprocess.TimeoutExpired:
                process.kill()
                outcome.problems.append(
                    f"the run did not end: {[kill.activity for kill in outcome.kills]}"
                )
                return outcome
            reader.join()
            watcher.join()
            if kill is not None:
                outcome.kills.append(kill)
            if kill is None or process.returncode == 0:
                break
            _note_told(kill, told, began, outcome)
        _check(outcome, process.returncode, out, told, expected, own, ever)
    return outcome


def _command(config: str, schedule: str, folder: Path, own: Path) -> list[str]:
    plan = write_plan(config, schedule, folder)
    return [
        *(
            sys.executable,
            "-m",
            "planner",
            "train",
            str(MODEL),
            "--plan",
            str(plan),
            "--steps",
            str(STEPS),
            "--json",
        ),
        *("--checkpoint-every", str(EVERY), "--checkpoint-folder", str(own / "checkpoints")),
        *("--save-weights", str(own / "weights.pt"), "--hang-timeout", str(HANG_TIMEOUT_S)),
    ]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _kill(process: subprocess.Popen[str], config: str, draw: random.Random) -> Kill | None:
    """Kill or stop a worker after a random time; return None when the run has ended before."""
    starting = draw.random() < STARTING_SHARE
    moment = time.monotonic() + draw.uniform(0, STARTING_S)
    further = draw.randrange(2 * EVERY)
    rank = draw.randrange(sum(int(part) for part in config.split("-")))
    number = draw.choice(SIGNALS)
    began: int | None = None
    store: Store | None = None
    while process.poll() is None:
        time.sleep(draw.uniform(0, 0.02))
        workers = workers_of(process.pid)
        if rank not in workers:
            continue
        at = None
        with suppress(OSError, RuntimeError):
            store = store or store_of(workers[rank])
            at = minibatch_of(store, rank)
        began = at if began is None else began
        come = began is not None and at is not None and at >= min(began + further, STEPS - 1)
        if come or (starting and time.monotonic() >= moment):
            with suppress(ProcessLookupError):
                os.kill(workers[rank], number)
                return Kill(
                    config,
                    rank,
                    number.name,
                    "while starting" if at is None else f"in minibatch {at}",
                )
    return None


def _note_told(
    kill: Kill, told: Sequence[tuple[float, str]], began: float, outcome: Outcome
) -> None:
    """Note when and as what the run, which has ended, told the kill."""
    at, text = next(
        ((at, text) for at, text in told if text.startswith("error: ")),
        (time.monotonic(), "nothing"),
    )
    kill.told_s = at - began
    cause = "was killed by SIGKILL" if kill.signal == "SIGKILL" else "it does not respond"
    kill.named = f"worker {kill.rank} (stage " in text and cause in text
    if not kill.named:
        outcome.problems.append(
            f"{kill.signal} of worker {kill.rank}, {kill.activity}, was told as: {text}"
        )


def _finish(process: subprocess.Popen[str], deadline: float) -> str:
    assert process.stdout is not None
    with process.stdout:
        process.wait(timeout=max(1.0, deadline - time.monotonic()))
        return process.stdout.read()


def _check(
    outcome: Outcome,
    code: int,
    out: str,
    told: Sequence[tuple[float, str]],
    expected: dict[str, Any],
    own: Path,
    ever: set[int],
) -> None:
    """Check that the result equals that of the run without kills bitwise, and that no process is
    left.
    """
    if code != 0:
        outcome.problems.append(
            f"the run ended with exit code {code}: {' / '.join(text for _, text in told)}"
        )
        return
    result = json.loads(out)
    if outcome.kills:
        outcome.kills[-1].went_on_from = result["first_minibatch"]
    if result["losses"] != [
        each for each in expected["losses"] if each["minibatch"] >= result["first_minibatch"]
    ]:
        outcome.problems.append(
            f"losses differ, last started at minibatch {result['first_minibatch']}"
        )
    weights = torch.load(own / "weights.pt", weights_only=True)
    right = torch.load(expected["saved_weights"], weights_only=True)
    if weights.keys() != right.keys() or not all(
        torch.equal(weights[name], right[name]) for name in right
    ):
        outcome.problems.append("the trained weights differ")
    left = [pid for pid in ever if _is_alive(pid)]
    if left:
        outcome.problems.append(f"{len(left)} processes are left")


def _read(process: subprocess.Popen[str], told: list[tuple[float, str]]) -> None:
    assert process.stderr is not None
    with process.stderr:
        for line in process.stderr:
            told.append((time.monotonic(), line.strip()))  # noqa: PERF401 - each when it comes


def _note_children(process: subprocess.Popen[str], ever: set[int]) -> None:
    while process.poll() is None:
        ever |= set(workers_of(process.pid).values())
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
