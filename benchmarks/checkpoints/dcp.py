"""Compare checkpoints with torch.distributed.checkpoint: time, memory, and what is found damaged.
See README.md.

python -m benchmarks.checkpoints.dcp
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from planner.errors import InputError
from planner.executor.checkpoint.folders import INDEX, Checkpoint, StagePart, load_checkpoint
from planner.executor.checkpoint.stage_parts import (
    Restorable,
    content_of,
    restore_stage,
    write_part,
)
from planner.executor.checkpoint.tensor_file import each_tensor, write_tensors
from planner.executor.communication.control import gather_bytes
from planner.formats.files import save_record

WIDTH, LAYERS = 2048, 8  # 134 MB of weights, and twice that of AdamW's moments
WAYS = ("ours", "dcp", "safetensors")
TASKS = {
    "save, 2 workers": ("save", 2),
    "load, 4 workers": ("load", 4),
    "load, 1 worker": ("load", 1),
}
ROUNDS = 3


def main() -> int:
    """Measure all ways in turn, and print the tables; with arguments, be one worker of a
    measurement.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if len(sys.argv) > 1:
        task, way, folder = sys.argv[1:]
        _work(task, way, Path(folder) / way)
        return 0
    found: defaultdict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="dcp-", dir=Path.cwd()) as folder:
        for _ in range(ROUNDS):
            for way in WAYS:
                for name, (task, workers) in TASKS.items():
                    found[way, name] += _run(task, way, folder, workers)
        rows = [
            [
                way,
                name,
                *(
                    f"{statistics.median(one[key] for one in each):.2f}"
                    for key in ("s", "cpu_s", "peak_mb")
                ),
            ]
            for (way, name), each in found.items()
        ]
        print(
            tabulate(
                rows,
                ["", "", "s", "CPU s per worker", "peak beside the stage, MB"],
                tablefmt="github",
            )
        )
        print("\nOf 100 files with one bit changed, in the same order: " + _damage(Path(folder)))
    return 0


def _run(task: str, way: str, folder: str, workers: int) -> list[dict[str, float]]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={workers}",
    ]
    command += ["-m", "benchmarks.checkpoints.dcp", task, way, folder]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    # lines of workers may be joined
    return [json.loads(found) for found in re.findall(r"\{.*?\}", done.stdout)]


class _Measured:
    """Seconds, and the most anonymous memory beyond what there was before, sampled every 2 ms."""

    def __enter__(self) -> None:
        self._ended, self._before = threading.Event(), _anonymous_bytes()
        self._most = self._before
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()
        self._began = time.perf_counter(), time.process_time()

    def _sample(self) -> None:
        while not self._ended.wait(0.002):
            self._most = max(self._most, _anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        self._ended.set()
        self._sampler.join()
        print(
            json.dumps({"s": wall_s, "cpu_s": cpu_s, "peak_mb": (self._most - self._before) / 1e6}),
            flush=True,
        )


def _anonymous_bytes() -> int:
    _, resident, shared, *_ = Path("/proc/self/statm").read_text(encoding="utf-8").split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _work(task: str, way: str, folder: Path) -> None:
    """Save or load this worker's layers, which are other ones when there are more workers."""
    dist.init_process_group("gloo")
    rank, per_worker = dist.get_rank(), LAYERS // dist.get_world_size()
    module = nn.ModuleDict(
        {str(rank * per_worker + n): nn.Linear(WIDTH, WIDTH) for n in range(per_worker)}
    )
    optimizer = torch.optim.AdamW(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    own = Restorable(rank, 0, module, optimizer)
    state: dict[str, Any] = dict(module.state_dict())
    for name, parameter in module.named_parameters():
        state |= {
            f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()
        }
    dist.barrier()
    with _Measured():
        if task == "save" and way == "ours":
            _save(folder, own)
        elif task == "save":
            save(state, storage_writer=_writer(way, folder))
        elif way == "ours":
            restore_stage(own, load_checkpoint(folder))
        else:
            load(state, storage_reader=_reader(way, folder))
        dist.barrier()
    dist.destroy_process_group()


def _save(folder: Path, own: Restorable) -> None:
    folder.mkdir(exist_ok=True)
    content = content_of(own)
    assert content is not None
    replies = gather_bytes(write_part(folder, own, content).model_dump_json().encode())
    if replies:
        index = Checkpoint(
            tool="", torch="", model="", graph_hash="", config="", schedule="1f1b", seed=0, minibatch=1,
            minibatch_size=1, minibatches_per_epoch=None, parts=tuple(map(StagePart.model_validate_json, replies)),
        )  # fmt: skip
        save_record(index, folder / INDEX)


def _writer(way: str, folder: Path) -> FileSystemWriter:
    if way == "dcp":
        return FileSystemWriter(folder)
    return HuggingFaceStorageWriter(str(folder), save_distributed=True)


def _reader(way: str, folder: Path) -> FileSystemReader:
    return FileSystemReader(folder) if way == "dcp" else HuggingFaceStorageReader(str(folder))


def _damage(folder: Path) -> str:
    """Change one bit at each of a hundred places of a file of 256 KiB, and say how many of the
    files are refused.
    """
    weights = torch.arange(65536.0)
    said = []
    for way in WAYS:
        outcomes: Counter[str] = Counter()
        path = folder / f"damaged-{way}"
        path.mkdir()
        if way == "ours":
            written = write_tensors(path / "weights.safetensors", {"w": weights})
        else:
            save({"w": weights}, storage_writer=_writer(way, path), no_dist=True)
        (data,) = (each for each in path.iterdir() if each.name != ".metadata")
        whole = data.read_bytes()
        for place in (len(whole) * hundredth // 100 for hundredth in range(100)):
            data.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            read: dict[str, Tensor] = {"w": torch.zeros_like(weights)}
            try:
                if way == "ours":
                    read = dict(each_tensor(data, None, written))
                else:
                    load(read, storage_reader=_reader(way, path), no_dist=True)
            except (InputError, CheckpointException):
                outcomes["refused"] += 1
            else:
                outcomes["read"] += 1
        said.append(f"{way} refuses {outcomes['refused']}, reads {outcomes['read']}")
    return "; ".join(said)


if __name__ == "__main__":
    sys.exit(main())
