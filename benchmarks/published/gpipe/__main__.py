"""Reproduce GPipe's tables (Huang et al., NeurIPS 2019) of throughput and largest models. See
README.md in this folder.

python -m benchmarks.published.gpipe --save
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.kept import Results
from benchmarks.published.gpipe import largest, throughput
from benchmarks.published.gpipe.throughput import (
    MICROBATCHES,
    PARTITIONS,
    PUBLISHED,
    RUN,
    Throughput,
)
from benchmarks.testbed.bed import testbed

HERE = Path(__file__).parent
PARTS = ("simulated", "largest", "run")


def main() -> None:
    """Run the parts asked for, print the tables, and save them if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="*",
        choices=PARTS,
        default=PARTS,
        help="these only, or none; the rest stays as kept",
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED), help="these only"
    )
    parser.add_argument(
        "--save", action="store_true", help="write results.json and the page in docs/"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(HERE, save=arguments.save)
    for part in arguments.parts:
        match part:
            case "simulated":
                simulate(arguments.models, results)
            case "largest":
                fit(arguments.models, results)
            case _:
                run(arguments.models, results)
    results.show(tables(results))


def simulate(models: list[str], results: Results) -> None:
    """Simulate all settings of the throughput tables."""
    for model in models:
        for m in MICROBATCHES:
            for k in PARTITIONS:
                _say("simulated", throughput.key(model, k, m))
                results.add(
                    "simulated",
                    throughput.key(model, k, m),
                    throughput.simulate_setting(model, k, m),
                )


def run(models: list[str], results: Results) -> None:
    """Run two and four partitions on one set of hosts."""
    with tempfile.TemporaryDirectory(prefix="gpipe-") as folder, testbed(max(RUN)) as bed:
        for model in models:
            for m in MICROBATCHES:
                profile = throughput.model_profile(model, m)
                for k in RUN:
                    key = throughput.key(model, k, m)
                    _say("run", key)
                    results.add(
                        "run", key, throughput.run_setting(bed, profile, k, m, Path(folder) / key)
                    )


def fit(models: list[str], results: Results) -> None:
    """Compute the memory of all published sizes."""
    if "transformer" in models:
        for column in largest.TRANSFORMERS:
            _say("largest", f"Transformer-L {column.size}")
            results.add(
                "largest", largest.key("Transformer-L", column), largest.fit_transformer(column)
            )
    if "amoebanet" in models:
        for column in largest.AMOEBANETS:
            _say("largest", f"AmoebaNet-D {column.size}")
            results.add(
                "largest", largest.key("AmoebaNet-D", column), largest.fit_amoebanet(column)
            )


def tables(results: Results) -> str:
    """Return all saved results in Markdown."""
    parts = []
    simulated, ran = (results.records(part, Throughput) for part in ("simulated", "run"))
    if simulated or ran:
        names = {"simulated": "simulated", "run": "run on emulated devices"}
        about = "; ".join(
            f"{name} {results.about(part)}" for part, name in names.items() if results.about(part)
        )
        parts.append(f"Throughput of K partitions with M microbatches ({about}):")
        parts.append(throughput.tables(simulated, ran))
    if fits := results.records("largest", largest.Fit):
        parts += [f"Largest models ({results.about('largest')}):", largest.tables(fits)]
    return "\n\n".join(parts)


def _say(part: str, what: str) -> None:
    print(f"{part}: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
