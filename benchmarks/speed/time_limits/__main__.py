"""Is a time limit kept on the wall clock, whatever runs beside the search? See README.md in this
folder.

python -m benchmarks.speed.time_limits --save
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import ROOT, printed
from benchmarks.speed.graphs import chain, encoder_decoder_like, nasnet_like, unet_like
from planner.formats.profile import Profile, load_profile, save_profile

LIMITS_S = (2, 4, 8)
# over the limit: a share of it, or the seconds that a process takes to start
SLACK, LEAST_SLACK_S = 0.1, 3.0
GRAPHS: Mapping[str, Callable[[], Profile]] = {
    "nasnet_like": nasnet_like,
    "unet_like": unet_like,
    "encoder_decoder_like": encoder_decoder_like,
    "chain_800": lambda: chain(800),
    "chain_3000": lambda: chain(3000),
}
# with tied weights
MEASURED = ("awd_lm", "bert", "gnmt8", "gpt2", "inception_v3", "llama", "resnet50", "t5", "vgg16")
KINDS = ("graph", "tied", "levels", "memory", "kinds", "tensor", "fit")
BUSY = "while True: pass"


@dataclass(frozen=True)
class Question:
    """One call of the command line, and the seconds that it may search."""

    kind: str
    model: str
    arguments: tuple[str, ...]
    limit_s: int

    @property
    def allowed_s(self) -> float:
        """Seconds of wall time that the whole call may take."""
        return self.limit_s + max(SLACK * self.limit_s, LEAST_SLACK_S)


def main() -> None:
    """Ask all questions, and print how long each took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the draw (default: %(default)s)")
    parser.add_argument("--questions", type=int, default=30, help="how many (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    arguments = parser.parse_args()
    with (
        printed(Path(__file__).parent, save=arguments.save),
        tempfile.TemporaryDirectory() as folder,
        busy_cores() as cores,
    ):
        start_s, start_cpu_s, _ = timed(["--version"], Path(folder))
        print(
            f"Seed {arguments.seed}, beside {cores} busy processes. `plan --version` took "
            f"{start_s:.1f} s of wall"
        )
        print(f"time and {start_cpu_s:.1f} s of the processor.\n")
        print(
            "| question | model | arguments | limit, s | allowed, s | wall, s | processor, s | "
            "kept | answer |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        kept = 0
        questions = list(drawn(random.Random(arguments.seed), arguments.questions, Path(folder)))
        for each in questions:
            wall_s, processor_s, code = timed(
                [*each.arguments, "--time-limit", f"{each.limit_s}s"], Path(folder)
            )
            kept += (within := wall_s <= each.allowed_s)
            shown = " ".join(argument for argument in each.arguments[1:] if "/" not in argument)
            print(
                f"| {each.kind} | {each.model} | {shown} | {each.limit_s} | {each.allowed_s:.1f} "
                f"| {wall_s:.1f} "
                f"| {processor_s:.1f} | {'yes' if within else '**no**'} | "
                f"{'plan' if code == 0 else f'exit {code}'} |",
                flush=True,
            )
        print(f"\n{kept} of {len(questions)} kept.")


def drawn(rng: random.Random, count: int, folder: Path) -> Iterator[Question]:
    """Draw questions of all kinds in turn."""
    for number in range(count):
        kind, limit_s = KINDS[number % len(KINDS)], rng.choice(LIMITS_S)
        model, profile = _drawn_model(rng, kind, folder)
        gpus, rate = (
            rng.choice((8, 16, 64, 256, 16384)),
            rng.choice(("10Gbps", "100Gbps", "nvlink4")),
        )
        cluster = ["--gpus", str(gpus), "--bandwidth", rate]
        if kind == "levels":
            servers = rng.choice((2, 8, 32))
            cluster = ["--topology", f"8x{servers}", "--bandwidth", "nvlink4,25Gbps"]
        if kind in ("memory", "tied"):
            cluster = [
                "--gpus",
                str(min(gpus, 256)),
                "--bandwidth",
                rate,
                "--memory",
                rng.choice(("1GB", "4GB", "16GB")),
            ]
        if kind == "kinds":
            half = rng.choice((2, 4, 16))
            cluster = [
                "--gpus",
                str(2 * half),
                "--bandwidth",
                rate,
                "--kinds",
                f"fast={half},slow={half}",
            ]
        schedule = [
            "--schedule",
            rng.choice(("1f1b", "2bw", "1f1b-flush", "zb-h1", "interleaved", "auto")),
        ]
        schedule = ["--schedule", "1f1b"] if kind == "kinds" else schedule
        if kind in ("fit", "tensor"):
            degrees = (
                ["--tensor", rng.choice(("1,2", "1,2,4", "1,2,4,8"))] if kind == "tensor" else []
            )
            gpu = ["--gpu", rng.choice(("a100-80gb", "rtx-4090", "h100"))]
            arguments = (
                "fit",
                str(profile),
                "--gpus",
                str(rng.choice((8, 16, 64))),
                *gpu,
                *degrees,
            )
            yield Question(kind, model, (*arguments, "-o", str(folder)), limit_s)
            continue
        profiles = (
            f"fast={profile},slow={_slower(profile, folder)}" if kind == "kinds" else str(profile)
        )
        yield Question(kind, model, ("solve", "--profile", profiles, *cluster, *schedule), limit_s)


def _slower(path: Path, folder: Path) -> Path:
    """Write the profile of a device that takes twice as long."""
    profile, slower = load_profile(path), folder / f"slower-{path.parent.name}.json"
    times = ("forward_s", "backward_s", "update_s")
    layers = tuple(
        layer.model_copy(update={name: 2 * getattr(layer, name) for name in times})
        for layer in profile.layers
    )
    save_profile(profile.model_copy(update={"layers": layers}), slower)
    return slower


def _drawn_model(rng: random.Random, kind: str, folder: Path) -> tuple[str, Path]:
    """Draw a model, and return its profile; for `plan fit`, its model file."""
    if kind in ("fit", "tensor"):
        name = rng.choice(("gpt2", "lstm_lm", "vgg16"))  # which need no other package
        return name, ROOT / "profiles" / name / "model.py"
    if kind == "tied":
        name = rng.choice(("awd_lm", "gpt2", "t5"))
        return name, ROOT / "profiles" / name / "cpu.json"
    if kind != "kinds" and rng.random() < 0.5:
        name = rng.choice(sorted(GRAPHS))
        path = folder / f"{name}.json"
        if not path.exists():
            save_profile(GRAPHS[name](), path)
        return name, path
    name = rng.choice(MEASURED)
    return name, ROOT / "profiles" / name / "cpu.json"


def timed(arguments: list[str], folder: Path) -> tuple[float, float, int]:
    """Call the command line in a process of its own, and return its wall and processor seconds and
    its exit code.
    """
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    command = [sys.executable, "-m", "planner", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, check=False
    ).returncode
    wall_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, code


@contextmanager
def busy_cores() -> Iterator[int]:
    """Keep every core busy with a process, and yield how many."""
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cores)]
    try:
        yield cores
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
