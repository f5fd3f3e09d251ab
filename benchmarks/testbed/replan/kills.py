"""Kill and stop workers while they move to another plan, at moments drawn by seed.

    python -m benchmarks.testbed.replan.kills --save

Each run writes checkpoints. It ends with a reason, in time, and the same command then goes on from
the newest checkpoint to the end. Its losses must be those of an undisturbed run, none left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.kept import Results
from benchmarks.testbed.replan.forced import Forced
from planner.errors import PlannerError
from planner.executor.observe.run_log import FILE
from planner.formats.files import write_text
from planner.workers.job import TrainResult

FOLDER = Path(__file__).parent
STEPS = 160
EVERY = 10
CASES = 20
HANG_S = 10.0  # without progress, after which a stopped worker ends the run
LONGEST_S = 90.0  # of a run; a move takes less than two seconds
MOST_S = 2.0  # after the begin of the move, of the disturbance
SAME = 1e-5  # relative losses of two cuts of one model


@dataclass(frozen=True)
class Row:
    """What became of a run."""

    seed: int
    what: str
    rank: int
    after_s: float  # since the move began
    end: str
    seconds: float
    lost: int  # minibatches without a loss, or with another one
    left: int  # folders in the memory of the host


def folders() -> set[str]:
    """Return the folders of moves in the memory of this host."""
    return {path.name for path in Path("/dev/shm").glob("plan-held-*-move-*")}


def disturbed(forced: Forced, choose: random.Random) -> tuple[str, int, float, threading.Thread]:
    """Draw what happens to which worker, and let it happen in a thread."""
    what = choose.choice(["kill", "stop"])
    rank = choose.randrange(2)
    after_s = choose.uniform(0.0, MOST_S)

    def strike() -> None:
        deadline = time.monotonic() + LONGEST_S
        while not (forced.folder / "moving").exists():
            if time.monotonic() > deadline:
                return
            time.sleep(0.005)
        time.sleep(after_s)
        pid = int((forced.folder / f"pid-{rank}").read_text("utf-8").split()[-1])
        try:
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            return  # the run had ended before

    return what, rank, after_s, threading.Thread(target=strike, daemon=True)


def measured(seed: int, forced: Forced, reference: TrainResult) -> Row:
    """Disturb a run, and go on from its newest checkpoint."""
    for path in forced.folder.glob("pid-*"):
        path.unlink()
    (forced.folder / "moving").unlink(missing_ok=True)
    shutil.rmtree(forced.folder / "checkpoints", ignore_errors=True)
    before = folders()
    what, rank, after_s, thread = disturbed(forced, random.Random(seed))
    thread.start()
    began_s = time.monotonic()
    end = "trained to the end"
    try:
        forced.train(STEPS, every=EVERY, hang_s=HANG_S)
    except PlannerError as error:
        end = error.message
    seconds = time.monotonic() - began_s
    thread.join()
    left = len(folders() - before)
    before_it = logged(forced.folder / "checkpoints" / FILE)
    result = forced.train(STEPS, every=EVERY, moves=False)
    # What comes after the checkpoint is trained again.
    found = {number: loss for number, loss in before_it.items() if number < result.first_minibatch}
    found |= {each.minibatch: each.loss for each in result.losses}
    return Row(seed, what, rank, after_s, end, seconds, lost(found, reference), left)


def logged(path: Path) -> dict[int, float | None]:
    """Return the losses that a run wrote beside its checkpoints."""
    _, *lines = path.read_text("utf-8").splitlines()
    return dict(pair for line in lines for pair in json.loads(line)["losses"])


def lost(found: Mapping[int, float | None], reference: TrainResult) -> int:
    """Count the minibatches that have no loss, or another one than in an undisturbed run."""
    return sum(
        not math.isclose(found.get(each.minibatch) or math.nan, each.loss or 0.0, rel_tol=SAME)
        for each in reference.losses
    )


def cases(seeds: Iterable[int]) -> Iterator[tuple[str, Row]]:
    """Disturb a run for each seed."""
    with tempfile.TemporaryDirectory() as name:
        forced = Forced.of(Path(name), 32, 4)
        reference = forced.train(STEPS, moves=False)
        for seed in seeds:
            yield str(seed), measured(seed, forced, reference)


def table(rows: Iterable[Row]) -> str:
    """Return what became of all runs."""
    rows = list(rows)
    headers = ("seed", "what", "worker", "after, s", "end", "seconds", "lost", "folders left")
    cells = tabulate(
        [list(vars(row).values()) for row in rows],
        headers=headers,
        floatfmt=".1f",
        tablefmt="github",
    )
    hangs = sum(row.seconds > LONGEST_S for row in rows)
    lost_minibatches = sum(row.lost for row in rows)
    left = sum(row.left for row in rows)
    counts = f"{len(rows)} runs, {hangs} hangs, {lost_minibatches} minibatches lost"
    return f"{counts}, {left} folders left in memory\n\n{cells}"


def main() -> None:
    """Disturb runs, and print what became of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=CASES)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    results = Results(FOLDER, save=arguments.save)
    first = arguments.first_seed
    rows = results.measured("kills", Row, cases(range(first, first + arguments.cases)))
    text = f"Measured: {results.about('kills')}\n\n{table(rows.values())}"
    print(text)
    if arguments.save:
        write_text(FOLDER / "kills.md", text + "\n")


if __name__ == "__main__":
    main()
