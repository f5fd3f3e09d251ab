"""Ask `plan fit` for what published recipes train, and price each recipe beside the answer.

    python -m benchmarks.expert.recipes --save

Both have the recipe's samples per update. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tabulate import tabulate

import planner
from benchmarks.kept import printed
from planner.analysis.given_plan import price
from planner.api.trainer_run import as_priced, stages_of
from planner.errors import PlannerError
from planner.exports.configuration import Configuration
from planner.formats.cluster import Cluster
from planner.formats.files import replace
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.profiler.estimated.devices import usual_dtype
from planner.stages.sharding import Sharding

HERE = Path(__file__).parent
FSDP = Sharding(3)
# Each server divides the weights.
HSDP = Sharding(3, 8)
ZERO_1 = Sharding(1)
SAME = 0.995  # of a speed, from which on two plans are as fast: estimates tell no more
# Where a recipe is not what is priced.
FP8 = "products in FP8"
EXPERTS = "priced with a group's experts in one server, sent without overlap"
OFFLOAD = "state in the host's memory, priced without"
SELECTIVE = "some operations recompute, priced without recomputation or with all"


@dataclass(frozen=True)
class Recipe:
    """What somebody published: how a model is trained, and how fast that was.

    Attributes:
        model: by name, or by the name of a file beside this one.
        run: with all degrees and batches; ranks that divide experts are those of `tensor`.
        tokens: per second and GPU, as measured.
        source: file and model of what was published.
        links: of its servers, inside and between, where they are not what such GPUs usually have.
        but: how the recipe differs from what is priced; empty where it does not.
    """

    model: str
    gpu: str
    gpus: int
    length: int
    run: Configuration
    tokens: float
    source: str
    but: str = ""
    links: str | None = None

    @property
    def kernels(self) -> dict[str, Any]:
        """What runs the operators, and the format of products in 8 bits: of `planner.fit`."""
        kernels: dict[str, Any] = {"stack": STACKS[self.source]}
        if FP8 in self.but:
            kernels["precision"] = "fp8"
        return kernels

    @property
    def title(self) -> str:
        return f"{self.model}, {self.gpus} {self.gpu}, {self.length} tokens"


def llama_tokens(tera_flops: float, length: int) -> float:
    """Return the tokens per second of llama-3.1-8b at so many TFLOP/s, as its source counts them:
    6 for each parameter, and causal attention's products, without recomputation.
    """
    layers, hidden, parameters = 32, 4096, 8.03e9
    return tera_flops * 1e12 / (6 * parameters + 6 * layers * hidden * length)


def run(micro: int, whole: int, tensor: int = 1, pipeline: int = 1, **more: Any) -> Configuration:
    """Return how a recipe trains: microbatch, global batch, ranks and stages."""
    return Configuration(
        micro_batch=micro, global_batch=whole, tensor=tensor, pipeline=pipeline, **more
    )


FMS = "fms-fsdp, README"
A100_SERVERS, H100_SERVERS = "nvlink3,400Gbps", "nvlink4,800Gbps"
OPEN = "ml-engineering, llama-3.1-8b"
NEMO = "NeMo-Framework-Launcher"
BRIDGE = "Megatron-Bridge"
# What ran the operators, as the sources say.
STACKS = {FMS: "compiled", OPEN: "compiled", NEMO: "megatron", BRIDGE: "megatron"}
OFFLOADED = run(1, 8, sharding=FSDP, recomputes=True)
RECIPES = (
    Recipe(
        "llama-7b",
        "a100-80gb",
        128,
        4096,
        run(2, 256, sharding=HSDP),
        4550,
        FMS,
        links=A100_SERVERS,
    ),
    Recipe("llama-7b", "h100", 96, 4096, run(2, 192, sharding=HSDP), 9600, FMS, links=H100_SERVERS),
    Recipe(
        "llama-2-34b",
        "a100-80gb",
        128,
        4096,
        run(2, 256, sharding=FSDP),
        820,
        FMS,
        SELECTIVE,
        A100_SERVERS,
    ),
    Recipe(
        "llama-2-34b",
        "h100",
        96,
        4096,
        run(2, 192, sharding=FSDP),
        1830,
        FMS,
        SELECTIVE,
        H100_SERVERS,
    ),
    Recipe(
        "llama-3.1-8b",
        "h200",
        8,
        8192,
        run(1, 8, sharding=Sharding(2)),
        llama_tokens(461, 8192),
        OPEN,
    ),
    Recipe("llama-3.1-8b", "h200", 8, 8192, OFFLOADED, llama_tokens(141, 8192), OPEN, OFFLOAD),
    Recipe("llama-3.1-8b", "h200", 8, 32768, OFFLOADED, llama_tokens(324, 32768), OPEN, OFFLOAD),
    Recipe(
        "gpt-oss-120b",
        "h100",
        64,
        4096,
        run(8, 1280, 8, 4, sharding=ZERO_1),
        5984,
        BRIDGE,
        EXPERTS,
    ),
    Recipe(
        "gpt-oss-120b",
        "b200",
        64,
        4096,
        run(32, 1280, 8, sharding=ZERO_1),
        13722,
        BRIDGE,
        EXPERTS,
    ),
    Recipe(
        "qwen3-30b-a3b",
        "h100",
        16,
        4096,
        run(8, 1024, 8, 2, sharding=ZERO_1),
        9058,
        BRIDGE,
        f"{FP8}; {EXPERTS}",
    ),
    Recipe("gpt3-5b", "h100", 64, 2048, run(4, 2048, sharding=ZERO_1), 23117, NEMO, FP8),
    Recipe("gpt3-20b", "h100", 64, 2048, run(2, 256, 2, sharding=ZERO_1), 5611, NEMO, FP8),
    Recipe("llama-7b", "h100", 8, 4096, run(1, 128, sharding=ZERO_1), 16154, NEMO, FP8),
    Recipe("llama-13b", "h100", 16, 4096, run(1, 128, 1, 4, sharding=ZERO_1), 8344, NEMO, FP8),
    Recipe("llama-13b", "h100", 8, 4096, run(1, 32, 1, 4, sharding=ZERO_1), 9384, NEMO, FP8),
    Recipe("llama-3-8b", "h100", 8, 8192, run(1, 128, sharding=FSDP), 14451, BRIDGE, FP8),
    Recipe("llama-3-8b", "b200", 8, 8192, run(2, 128, sharding=ZERO_1), 30624, BRIDGE, FP8),
    Recipe(
        "llama-3-70b",
        "h100",
        64,
        8192,
        run(1, 256, 4, 8, chunks=2, sharding=ZERO_1, sequence_parallel=True),
        1664,
        BRIDGE,
        f"{FP8}; 5 chunks, priced with 2",
    ),
    Recipe("llama-3-70b", "gb200", 64, 8192, run(2, 256, sharding=FSDP), 4357, BRIDGE, FP8),
    Recipe(
        "llama-3-70b",
        "h100",
        32,
        4096,
        run(1, 32, 4, 4, chunks=5, sharding=ZERO_1, sequence_parallel=True),
        1638,
        BRIDGE,
        FP8,
    ),
)


@dataclass(frozen=True)
class Row:
    """An answer beside a recipe.

    Attributes:
        ours: our plan; None where nothing fits.
        theirs: the recipe, by our price.
        again: whether the recipe is priced with all layers recomputing, since it does not fit
            otherwise.
        why_not: there is no price.
        seconds: from the question to the answer.
    """

    recipe: Recipe
    ours: Plan | None
    theirs: Plan | None
    again: bool
    why_not: str
    seconds: float

    @property
    def speedup(self) -> float | None:
        """Times as fast that our answer is as the recipe, where the recipe fits."""
        if self.ours is None or self.theirs is None or lacking(self.theirs):
            return None
        return (
            self.theirs.predicted.seconds_per_minibatch / self.ours.predicted.seconds_per_minibatch
        )

    @property
    def of_measured(self) -> float | None:
        """The recipe's price, relative to what was measured."""
        if self.theirs is None or self.theirs.predicted.tokens_per_s is None:
            return None
        return self.theirs.predicted.tokens_per_s / self.recipe.gpus / self.recipe.tokens

    def cells(self) -> dict[str, str]:
        run = self.recipe.run
        ways = {"TP": run.tensor, "PP": run.pipeline, "VP": run.chunks or 1}
        described = " ".join(f"{name}{count}" for name, count in ways.items() if count > 1)
        if run.sharding.divides_anything:
            described += f" {run.sharding.title}"
        fits = ""
        if self.theirs is not None:
            over = lacking(self.theirs)
            fits = f" ({over / 1e9:.0f} GB too many)" if over else ""
        return {
            "question": self.recipe.title,
            "recipe": f"{described.strip()}, microbatch {run.micro_batch} of {run.global_batch}",
            "ours": "none" if self.ours is None else described_plan(self.ours),
            "ours over it": "" if self.speedup is None else f"{self.speedup:.2f}x",
            "it, by our price": per_gpu(self.theirs, self.recipe) + fits
            if self.theirs is not None
            else self.why_not,
            "recomputing": "yes" if self.again else "",
            "it, measured": f"{self.recipe.tokens:,.0f}",
            "price/measured": "" if self.of_measured is None else f"{self.of_measured:.2f}",
            "but": self.recipe.but,
            "source": self.recipe.source,
            "seconds": f"{self.seconds:.0f}",
        }


def per_gpu(plan: Plan, recipe: Recipe) -> str:
    return f"{(plan.predicted.tokens_per_s or 0) / recipe.gpus:,.0f}"


def lacking(plan: Plan) -> int:
    """Return by how many bytes the fullest GPU has too little memory."""
    return max(map(plan.lacking_bytes, range(len(plan.stages))))


def described_plan(plan: Plan) -> str:
    level = max(stage.level for stage in plan.stages)
    parts = [short_config(plan.config), f"microbatch {plan.microbatch_size}"]
    parts += [f"ZeRO-{level}"] if level else []
    parts += ["recomputing"] if any(stage.recomputes for stage in plan.stages) else []
    return ", ".join(parts)


def answered(recipe: Recipe) -> Row:
    """Ask what the recipe trains, and price the recipe on the same GPUs."""
    path = HERE / f"{recipe.model}.json"
    with tempfile.TemporaryDirectory() as folder:
        began_s = time.perf_counter()
        fitted = planner.fit(
            str(path) if path.exists() else recipe.model,
            recipe.gpus,
            gpu=recipe.gpu,
            length=recipe.length,
            minibatch=recipe.run.global_batch,
            bandwidth=recipe.links,
            **recipe.kernels,
            place=folder,
        )
        seconds = time.perf_counter() - began_s
        ours = fitted.asked.plan
        if ours is None:
            return Row(recipe, None, None, False, fitted.asked.why_not, seconds)
        try:
            theirs, again = priced(recipe, Path(folder) / fitted.model_file, ours.cluster)
        except PlannerError as error:
            return Row(recipe, ours, None, False, error.message, seconds)
    return Row(recipe, ours, theirs, again, "", seconds)


def priced(recipe: Recipe, model: Path, cluster: Cluster) -> tuple[Plan, bool]:
    """Return the recipe's plan, with all layers recomputing where it does not fit otherwise."""
    profile = planner.estimate(
        model,
        batch_size=recipe.run.micro_batch,
        device=recipe.gpu,
        dtype=usual_dtype(recipe.gpu),
        master_weights=True,
        tensor=[recipe.run.tensor] if recipe.run.tensor > 1 else (),
        **recipe.kernels,
    )
    given, _ = as_priced(recipe.run, recipe.gpus)
    if given.tensor > 1 and given.sequence_parallel:
        cluster = replace(cluster, sequence_parallel=True)
    plan = price(profile, cluster, stages_of(given, profile, recipe.gpus))
    if not lacking(plan) or given.recomputes:
        return plan, given.recomputes
    again = replace(given, recomputes=True)
    return price(profile, cluster, stages_of(again, profile, recipe.gpus)), True


def main(argv: Sequence[str] | None = None) -> int:
    """Ask all questions, and print the table; return 1 where an answer is slower than a recipe."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert.recipes", description=__doc__
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first to ask")
    parser.add_argument("--until", type=int, help="number of the first not to ask")
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to recipes.md beside this"
    )
    args = parser.parse_args(argv)
    rows = []
    for recipe in RECIPES[args.first : args.until]:
        rows.append(answered(recipe))
        print(rows[-1].cells(), file=sys.stderr, flush=True)
    with printed(HERE, save=args.save, name="recipes.md"):
        cells = [row.cells() for row in rows]
        print(tabulate(cells, headers="keys", tablefmt="github", disable_numparse=True))
        print()
        for line in summary(rows):
            print(line)
    return int(any(row.speedup is not None and row.speedup < SAME for row in rows))


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Say how many answers are slower than the recipe, and how far prices are from what was
    measured, of recipes that are priced as they are.
    """
    slower = [row for row in rows if row.speedup is not None and row.speedup < SAME]
    longest = max(row.seconds for row in rows)
    yield f"{len(slower)} of {len(rows)} answers are slower than the recipe by our price."
    yield f"The longest took {longest:.0f} s."
    for but, words in (("", "that are priced as they are"), (FP8, "with products in FP8")):
        ratios = [row.of_measured for row in rows if row.recipe.but == but]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            far = median(abs(ratio - 1) for ratio in known)
            yield (
                f"Of {len(known)} recipes {words}, the median distance from what was measured is "
                f"{far:.0%}."
            )


if __name__ == "__main__":
    sys.exit(main())
