"""The whole model's weights in one file, from workers that hold parts of them."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.errors import InputError, PlannerError
from planner.executor.checkpoint import tensor_file
from planner.executor.checkpoint.tensor_file import Fact, TensorFile
from planner.executor.checkpoint.trained_weights import read_trained, save_gathered
from planner.executor.communication.control import join_group
from tests.executor.processes import TIMEOUT_S


def _state(rank: int) -> dict[str, Tensor]:
    """Two names of one weight, an empty tensor, several pieces, another layout; "both" is on both
    workers.
    """
    torch.manual_seed(rank)
    tied = nn.Linear(3, 5).weight.detach()
    return {
        f"{rank}.tied": tied,
        f"{rank}.again": tied.detach(),
        f"{rank}.empty": torch.empty(0, 4),
        f"{rank}.number": torch.tensor(7 + rank),
        f"{rank}.turned": torch.randn(40, 30).t().bfloat16(),
        f"{rank}.flag": torch.tensor([True, False]),
        "both": torch.ones(2),
    }


def _expected() -> dict[str, Tensor]:
    return _state(0) | _state(1)


@pytest.fixture
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }.items():
            patch.setenv(name, value)
        meeting = tmp_path_factory.mktemp("meeting") / "file"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
def test_weights_are_readable_for_whom_the_umask_lets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.pt"
    before = os.umask(0o027)
    try:
        save_gathered({"weight": torch.ones(2)}, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [each.name for each in tmp_path.iterdir()] == ["weights.pt"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    for name in ("below", "below.safetensors"):
        with pytest.raises(
            PlannerError, match=r"cannot be written to .* they are in '.*elsewhere/below-\d+"
        ) as error:
            save_gathered({"weight": torch.ones(2)}, path / name)
        rescued = Path(error.value.message.rpartition(" in ")[2].strip("'"))
        assert torch.equal(read_trained(rescued)["weight"], torch.ones(2))
    with pytest.raises(InputError, match="safetensors files cannot hold"):
        save_gathered(
            {"weight": torch.ones(2, dtype=torch.complex128)}, tmp_path / "complex.safetensors"
        )


def test_tensors_of_two_workers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    command += [
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        __file__,
        str(tmp_path),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(Path.cwd()),
    }
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in ("weights.pt", "weights.safetensors"):
        found = read_trained(tmp_path / name)
        assert found.keys() == _expected().keys()
        for key, tensor in _expected().items():
            assert torch.equal(found[key], tensor), key
            assert found[key].dtype == tensor.dtype
    (rescued,) = (tmp_path / "elsewhere").iterdir()
    assert (
        (tmp_path / "told")
        .read_text()
        .endswith(f"No space left on device; they are in '{rescued}'")
    )
    assert not (tmp_path / "full.safetensors").exists()
    found = read_trained(rescued)
    assert all(torch.equal(found[key], tensor) for key, tensor in _expected().items())


def _worker(folder: Path) -> None:
    tensor_file._PIECE_BYTES = 256
    join_group()
    for name in ("weights.pt", "weights.safetensors"):
        save_gathered(_state(dist.get_rank()), folder / name)
    _write_on_a_full_disk(folder)
    dist.destroy_process_group()


def _write_on_a_full_disk(folder: Path) -> None:
    """Let the disk be full between two tensors that the other worker sends."""
    whole, tempfile.tempdir = tensor_file.write_each, str(folder / "elsewhere")
    (folder / "elsewhere").mkdir(exist_ok=True)

    def write_some(path: Path, facts: Sequence[Fact], tensors: Iterable[Tensor]) -> TensorFile:
        if path.parent == folder:
            assert len(list(islice(tensors, 5))) == 5
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, facts, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "write_each", write_some)
        try:
            save_gathered(_state(dist.get_rank()), folder / "full.safetensors")
        except PlannerError as error:
            assert dist.get_rank() == 0
            (folder / "told").write_text(error.message)
    dist.barrier()  # the other worker has not been left behind


if __name__ == "__main__":
    _worker(Path(sys.argv[1]))
