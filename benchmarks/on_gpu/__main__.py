"""Measure what the package does on a GPU, a part at a time. See README.md in this folder.

python -m benchmarks.on_gpu                       # all parts, into the folder beside this file
python -m benchmarks.on_gpu models --only "gpt2 32 bfloat16"
python -m benchmarks.on_gpu kernels host --output /tmp/on_gpu
python -m benchmarks.on_gpu --tables              # measures nothing; writes the pages from what
                                                  # was kept
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.kept import Results, environment
from benchmarks.on_gpu import context, host, kernels, models, tables

PARTS = ("models", "host", "context", "kernels")
CONTEXT_PARTS = {context.Row: "context", context.Communicators: "communicators"}
NO_GPU = "This benchmark measures a CUDA device, and PyTorch sees none here."


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts and print their tables; return 2 without a GPU, and 1 where a model
    failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--only", action="append", metavar="CASE", help="of the models, as results.json names it"
    )
    parser.add_argument(
        "--output", type=Path, default=tables.FOLDER, help="folder of results.json and kernels.csv"
    )
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing, and write the pages"
    )
    asked = parser.parse_args(arguments)
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no part is named {', '.join(sorted(unknown))}")
    if asked.tables:
        tables.write_pages()
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    failed = measure(asked.parts or PARTS, asked.only, asked.output)
    print("\n\n".join(tables.all_tables(asked.output).values()))
    if asked.output == tables.FOLDER:
        tables.write_pages()
    return 1 if failed else 0


def measure(parts: Sequence[str], only: Sequence[str] | None, output: Path) -> list[str]:
    """Measure parts, keep each row when it is there, and return the cases that failed."""
    output.mkdir(parents=True, exist_ok=True)
    results, failed = Results(output, save=True, machine=machine()), []

    def keep(part: str, name: str, row: object) -> None:
        results.add(part, name, row)
        print(f"{part}: {name}: {row}", flush=True)

    if "context" in parts:  # before this process has a context of its own, which would count
        context.measure(
            lambda name, row: keep(
                "context" if isinstance(row, context.Row) else "communicators", name, row
            )
        )
    if "host" in parts:
        host.measure(lambda name, row: keep("host", name, row))
    if "models" in parts:
        for case in models.CASES:
            if only and case.name not in only:
                continue
            try:
                keep("models", case.name, models.measure(case))
            except Exception:  # one model must not hide the others
                traceback.print_exc()
                failed.append(case.name)
    if "kernels" in parts:
        rows: list[kernels.Row] = []
        kernels.measure(rows.append)
        kernels.write(rows, output / kernels.FILE)
        results.add("kernels", "all", kernels.Kept(len(rows)))
    return failed


def machine() -> str:
    """Return the GPU, what drives it, and the host."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    gpu = torch.cuda.get_device_name(0)
    return f"{gpu}, driver {driver}, CUDA {torch.version.cuda}, NCCL {version}, {environment()}"


if __name__ == "__main__":
    raise SystemExit(main())
