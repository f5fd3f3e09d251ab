"""Ask `plan fit` what experts have answered, and price their answers beside its own. See README.md
in this folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

import planner
from benchmarks.kept import printed
from planner.errors import PlannerError
from planner.formats.plan import Plan
from planner.formats.plan_parts import short_config
from planner.plan.blocks import units_of_stage
from planner.plan.trainable import check_trainable
from planner.profiler.estimated.devices import usual_dtype
from planner.reporting.tables.verdict import share_of_speed
from planner.units import SLACK

HERE = Path(__file__).parent
FSDP = "ZeRO-3"


@dataclass(frozen=True)
class Question:
    """A model and GPUs, with what is published for them.

    Attributes:
        published: what people run there, and `source` where they say so.
        way: the row of the planner's own table that this is, by the beginning of its name.
        stages: and replicas, as `plan price` takes them, with `size` samples in a microbatch, where
            it is a pipeline.
        more: of `planner.fit`.
    """

    model: str
    gpus: int
    gpu: str
    published: str
    source: str
    way: str | None = None
    stages: int | None = None
    replicas: str = ""
    size: int = 1
    more: dict[str, Any] = field(default_factory=dict)


# workstations of one GPU each on their office's network
SLOW = {"servers": 4, "bandwidth": "1Gbps"}
LAN = {"servers": 2, "bandwidth": "pcie4,10Gbps"}
MEGATRON = "Korthikanti et al. 2022"
EXPERTS = "experts divided over 8 GPUs"
QUESTIONS = (
    Question("llama-7b", 8, "a100-80gb", "FSDP", "llm-foundry, 7B on 8 A100", FSDP),
    Question("llama-7b", 8, "a100", "FSDP", "llm-foundry, 7B on 8 A100 of 40 GB", FSDP),
    Question("llama-13b", 8, "a100-80gb", "FSDP", "llm-foundry, 13B on 8 A100", FSDP),
    Question("llama-3-8b", 8, "h100", "FSDP", "torchtitan, 8B on 8 H100", FSDP),
    Question(
        "llama-3-8b", 128, "h100", "FSDP", "torchtitan, 8B on 128 H100", FSDP, more={"length": 8192}
    ),
    Question(
        "llama-3-70b",
        256,
        "h100",
        "FSDP",
        "torchtitan, 70B on 256 H100",
        FSDP,
        more={"length": 8192},
    ),
    Question(
        "bert-large",
        8,
        "t4",
        "DDP in float16",
        "NVIDIA DeepLearningExamples, BERT on T4",
        "data parallel",
    ),
    Question("vit-large", 8, "a100", "DDP", "timm's practice", "data parallel"),
    Question("t5-3b", 4, "a10g", "ZeRO-2", "DeepSpeed's guides, T5-3B", "ZeRO-2"),
    Question("gpt2-xl", 8, "rtx-4090", "ZeRO-1 to 3", "DeepSpeed's guides", "ZeRO"),
    Question(
        "bert-large",
        4,
        "rtx-3090",
        "DDP over 1 Gbit/s",
        "a plain torchrun",
        "data parallel",
        more=SLOW,
    ),
    Question(
        "gpt2-medium",
        4,
        "rtx-3090",
        "DDP over 1 Gbit/s",
        "a plain torchrun",
        "data parallel",
        more=SLOW,
    ),
    Question(
        "mistral-7b", 16, "rtx-4090", "FSDP over 10 Gbit/s", "a plain torchrun", FSDP, more=LAN
    ),
    Question("gpt-22b", 8, "a100-80gb", "TP8", MEGATRON, stages=1, replicas="1x8", size=4),
    Question(
        "gpt-neox-20b",
        96,
        "a100",
        "TP2 PP4 DP12",
        "Black et al. 2022",
        stages=4,
        replicas="12x2",
        size=4,
    ),
    Question(
        "mixtral-8x7b",
        16,
        "h100",
        EXPERTS,
        "Megatron-LM, mixtral",
        stages=2,
        replicas="1x8",
        size=32,
    ),
    Question(
        "qwen3-30b-a3b",
        16,
        "h100",
        EXPERTS,
        "Megatron-LM, qwen3 MoE",
        stages=2,
        replicas="1x8",
        size=16,
    ),
    Question(
        "deepseek-v2-lite",
        8,
        "h100",
        EXPERTS,
        "Megatron-LM, V2-Lite",
        stages=1,
        replicas="1x8",
        size=32,
    ),
    Question(
        "qwen2.5-72b", 32, "h100", "TP8 PP4", "Megatron-LM's practice", stages=4, replicas="1x8"
    ),
    Question(
        "llama-70b",
        64,
        "a100-80gb",
        "TP8 PP4 DP2",
        "NeMo, llama2 70B on A100",
        stages=4,
        replicas="2x8",
    ),
    Question(
        "gpt3-175b",
        512,
        "h100",
        "TP4 PP8 DP16",
        "MLPerf 3.1, 2,048 samples",
        stages=8,
        replicas="16x4",
    ),
    Question(
        "bloom-176b",
        384,
        "a100-80gb",
        "TP4 PP12 DP8",
        "BLOOM, 2022",
        stages=12,
        replicas="8x4",
        size=2,
    ),
    Question(
        "gpt-530b",
        280,
        "a100-80gb",
        "TP8 PP35",
        MEGATRON,
        stages=35,
        replicas="1x8",
        more={"minibatch": 280},
    ),
    Question(
        "llama-3-405b",
        512,
        "h100",
        "TP8 PP8 (VP8 CP2)",
        "NeMo, llama 3.1 405B on 512 H100",
        stages=8,
        replicas="8x8",
        more={"length": 8192},
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert", description=__doc__)
    parser.add_argument(
        "--models", nargs="+", default=sorted({each.model for each in QUESTIONS}), metavar="NAME"
    )
    parser.add_argument(
        "--save", action="store_true", help="write what is printed to results.md beside this"
    )
    args = parser.parse_args(argv)
    rows = []
    for question in QUESTIONS:
        if question.model in args.models:
            rows.append(answered(question))
            print(rows[-1], file=sys.stderr, flush=True)
    with printed(HERE, save=args.save):
        print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    return 0


def answered(question: Question) -> dict[str, str]:
    """Return a row: the question, what is published, our plan, and how much faster it is by our
    price.
    """
    path = HERE / f"{question.model}.json"
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        model = str(path) if path.exists() else question.model
        found = planner.fit(model, question.gpus, gpu=question.gpu, place=folder, **question.more)
        seconds = time.perf_counter() - began
        row = {
            "question": f"{question.model}, {question.gpus} {question.gpu}",
            "published": f"{question.published} ({question.source})",
        }
        plan = found.asked.plan
        if plan is None:
            return row | {"ours": found.asked.why_not, "seconds": f"{seconds:.0f}"}
        theirs = _theirs(question, plan, Path(folder) / found.model_file)
    fitting = [way for way in plan.baselines if not way.over_memory_bytes]
    fastest = min(fitting, key=lambda way: way.seconds_per_microbatch, default=None)
    used = plan.predicted.flop_utilisation
    return row | {
        "ours": _described(plan),
        "tokens/s": f"{plan.predicted.tokens_per_s or 0:,.0f}",
        "of the peak": "" if used is None else f"{used:.0%}",
        "over theirs": theirs,
        "fastest of the usual ways": "" if fastest is None else fastest.name,
        "over it": "" if fastest is None else f"{share_of_speed(plan, fastest) ** -1:.2f}x",
        "gap": _gap(plan),
        "trains here": _trains(plan),
        "seconds": f"{seconds:.0f}",
    }


def _described(plan: Plan) -> str:
    level = max(stage.level for stage in plan.stages)
    again = sum(bool(stage.recomputes) for stage in plan.stages)
    parts = [short_config(plan.config), f"microbatch {plan.microbatch_size}"]
    parts += [f"interleaved, {plan.chunks} chunks"] if plan.chunks > 1 else []
    parts += [f"ZeRO-{level}"] if level else []
    parts += [f"{again} of {len(plan.stages)} recompute"] if again else []
    return ", ".join(parts)


def _gap(plan: Plan) -> str:
    """Return how much faster another plan could be at most, and by the cost model alone, which no
    waiting adds to.
    """
    solver, seconds = plan.solver, plan.predicted.seconds_per_minibatch
    gap = f"{solver.gap:.0%}"
    if solver.cost_model_s is not None and solver.cost_model_s < seconds * (1 - SLACK):
        gap += f", by the cost model {max(0.0, 1 - solver.lower_bound_s / solver.cost_model_s):.0%}"
    return gap + (f" ({solver.bound_of})" if solver.bound_of else "")


def _theirs(question: Question, plan: Plan, model: Path) -> str:
    """Return how many times as fast our plan is as theirs, by our price, and whether theirs fits
    the memory.
    """
    if question.way is not None:
        ways = [way for way in plan.baselines if way.name.startswith(question.way)]
        fitting = [way for way in ways if not way.over_memory_bytes]
        if not fitting:
            return "does not fit"
        return f"{min(1 / share_of_speed(plan, way) for way in fitting):.2f}x"
    if question.stages is None:
        return ""
    degree = int(question.replicas.rpartition("x")[2])
    dtype = usual_dtype(question.gpu)
    how: dict[str, Any] = {
        "dtype": dtype,
        "master_weights": plan.master_weights is not None,
        "tensor": [degree],
        "stack": plan.stack,
        "precision": plan.products,
    }
    profile = planner.estimate(model, batch_size=question.size, device=question.gpu, **how)
    priced, blocks = None, dict[int, int]()
    for _ in range(2):
        priced = planner.price(
            profile,
            plan.cluster,
            question.stages,
            replicas=question.replicas,
            recompute=blocks,
            shard_optimizer="all" if not question.replicas.startswith("1x") else (),
            schedule="1f1b-flush",
            microbatches=(plan.minibatch_size or 1) // question.size,
        )
        if not max(map(priced.lacking_bytes, range(len(priced.stages)))):
            break
        blocks = {
            number: len(units_of_stage(stage.layers, ()))
            for number, stage in enumerate(priced.stages)
        }
    assert priced is not None
    lacks = max(map(priced.lacking_bytes, range(len(priced.stages))))
    again = ", recomputing" if any(stage.recomputes for stage in priced.stages) else ""
    over = priced.predicted.seconds_per_minibatch / plan.predicted.seconds_per_minibatch
    if plan.predicted.by != "simulation":
        again += ", ours not simulated"
    return f"{over:.2f}x{again}" + (
        f", does not fit ({lacks / 1e9:.0f} GB too many)" if lacks else ""
    )


def _trains(plan: Plan) -> str:
    try:
        check_trainable(plan)
    except PlannerError as error:
        return f"no: {error.message}"
    return "yes"


if __name__ == "__main__":
    sys.exit(main())
