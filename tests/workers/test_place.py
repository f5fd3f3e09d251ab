"""The choice of devices and backends, for workers whose GPUs are made up: machines with several are
not there.

What CUDA and NCCL find in a worker's environment.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from planner.errors import InputError
from planner.formats.names import Backend, DeviceType
from planner.profiler.measured.profiling import ProfilingOptions
from planner.workers.place import (
    CPU,
    GPU_VARIABLES,
    Gpu,
    Place,
    Seat,
    assign_gpus,
    choose_place,
    gpus_here,
    kind_here,
    names_of,
    set_gpu_variables,
    take,
    visible_gpus,
)
from tests.workers.fake_gpus import fake_gpus


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in GPU_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    set_gpu_variables()
    found = {name: os.environ[name] for name in GPU_VARIABLES}
    assert found == GPU_VARIABLES | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)


def make_seats(*visible: str, host: str = "a") -> list[Seat]:
    """Return workers that see GPUs with these UUIDs: "xy" are two."""
    return [
        Seat(
            rank=rank,
            host=host,
            server=0,
            gpus=tuple(Gpu(uuid=uuid, name="A100") for uuid in uuids),
        )
        for rank, uuids in enumerate(visible)
    ]


@pytest.mark.parametrize(
    ("visible", "chosen"),
    [
        (("xy", "xy"), [0, 1]),  # torchrun on one host
        (("xy", "xy", "zw", "zw"), [0, 1, 0, 1]),  # on two
        (("x", "y", "z"), [0, 0, 0]),  # a Slurm task sees its own GPU only
        (("xy", "xy", "xy", "xy"), [0, 1, 0, 1]),  # more workers than GPUs
        (("xy", "yx"), [0, 0]),  # the same GPUs in another order
        (("xy", "x"), [1, 0]),  # the second has no choice
    ],
)
def test_workers_take_gpus_that_no_other_has_taken(
    visible: tuple[str, ...], chosen: list[int]
) -> None:
    assert assign_gpus(make_seats(*visible)) == chosen


@pytest.mark.parametrize(
    ("visible", "device", "backend", "places"),
    [
        (("", ""), None, None, [CPU, CPU]),
        (("xy", "xy"), None, None, [Place(CUDA0, CUDA0), Place(CUDA1, CUDA1)]),
        (("x", "y"), None, None, [Place(CUDA0, CUDA0), Place(CUDA0, CUDA0)]),
        (("xy", "xy"), "cpu", None, [CPU, CPU]),
        (("xy", "xy"), "cuda", "nccl", [Place(CUDA0, CUDA0), Place(CUDA1, CUDA1)]),
        (("x", "x"), "cuda", "gloo", [Place(CUDA0, CPU.wire)] * 2),
        (("xy", "xy"), None, "gloo", [Place(CUDA0, CPU.wire), Place(CUDA1, CPU.wire)]),
    ],
)
def test_places(
    visible: tuple[str, ...],
    device: DeviceType | None,
    backend: Backend | None,
    places: list[Place],
) -> None:
    seats = make_seats(*visible)
    assert [choose_place(seats, rank, device, backend) for rank in range(len(seats))] == places


@pytest.mark.parametrize(
    ("visible", "device", "backend", "message"),
    [
        (
            ("x", "x"),
            None,
            None,
            r"^worker 0 \(a\) and worker 1 \(a\) would share one GPU, and NCCL needs one",
        ),
        (
            ("xy", "xy", "xy"),
            "cuda",
            None,
            r"^worker 0 \(a\) and worker 2 \(a\) would share one GPU",
        ),
        (("x", ""), None, None, r"^PyTorch sees no GPU in worker 1 \(a\), but others do"),
        (("", ""), "cuda", None, r"^PyTorch sees no GPU in worker 0 \(a\) and worker 1 \(a\)\n"),
        (
            ("x", "y"),
            "cpu",
            "nccl",
            "`backend=nccl` sends from GPUs, and `device=cpu` computes on none",
        ),
        (("", ""), None, "nccl", "`backend=nccl` sends from GPUs"),
    ],
)
def test_what_is_not_there_is_refused_on_every_worker(
    visible: tuple[str, ...], device: DeviceType | None, backend: Backend | None, message: str
) -> None:
    seats = make_seats(*visible)
    for rank in range(len(seats)):
        with pytest.raises(InputError, match=message):
            choose_place(seats, rank, device, backend)


def test_workers_that_are_to_share_a_gpu_over_nccl_are_on_hosts_of_their_own_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "of the user")  # and restores it afterwards
    fake_gpus(monkeypatch, "x")
    seats = make_seats("x", "x")
    places = [choose_place(seats, rank, "cuda", "nccl") for rank in range(2)]
    assert [place.wire for place in places] == [CUDA0, CUDA0]
    take(places[0])
    first = os.environ["NCCL_HOSTID"]
    take(places[1])
    assert first != os.environ["NCCL_HOSTID"]


def test_a_torch_without_nccl_is_told_to_use_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(
        InputError, match="this PyTorch has no NCCL\nhint: send with `backend=gloo`"
    ):
        choose_place(make_seats("x"), 0, None, None)


def test_without_being_told_a_gpu_is_used_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert kind_here() == "cpu"
    assert ProfilingOptions().checked_device() == torch.device("cpu")
    fake_gpus(monkeypatch, "x", "y")
    assert (kind_here(), gpus_here()) == ("cuda", 2)
    assert visible_gpus("cuda") == (
        Gpu(uuid="x", name="NVIDIA L4"),
        Gpu(uuid="y", name="NVIDIA L4"),
    )
    assert ProfilingOptions().checked_device() == torch.device("cuda")
    assert ProfilingOptions(device="cuda:1").checked_device() == CUDA1
    with pytest.raises(InputError, match="there is no device 'cuda:2': PyTorch sees 2 GPUs"):
        ProfilingOptions(device="cuda:2").checked_device()


def test_the_gpu_of_a_place_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current = fake_gpus(monkeypatch, "x", "y")
    take(CPU)
    assert current == []
    take(Place(CUDA1, CPU.wire))
    assert current == [CUDA1]


def test_many_workers_are_named_briefly() -> None:
    assert names_of(make_seats("x", "x", host="b")) == "worker 0 (b) and worker 1 (b)"
    assert names_of(make_seats(*"xxxxxx")).endswith("worker 3 (a) and 2 more")


def test_slices_of_one_gpu_are_one_gpu_to_nccl() -> None:
    """NCCL tells GPUs apart by their place on the bus, which MIG's slices share, whatever their
    UUIDs.
    """
    slices = [
        Gpu(uuid=f"MIG-{number}", name="A100 MIG 3g.20gb", board="00:1b:00") for number in range(2)
    ]
    seats = [Seat(rank=rank, host="a", server=0, gpus=(gpu,)) for rank, gpu in enumerate(slices)]
    message = (
        r"^worker 0 \(a\) and worker 1 \(a\) would have slices of one GPU, "
        r"and NCCL needs one for each"
    )
    with pytest.raises(InputError, match=message):
        choose_place(seats, 0, "cuda", None)
    assert choose_place(seats, 0, "cuda", "gloo").wire == CPU.wire
    # the same place in another host
    elsewhere = [seats[0], seats[1].model_copy(update={"host": "b"})]
    assert choose_place(elsewhere, 1, "cuda", None) == Place(CUDA0, CUDA0)


def test_the_place_of_a_gpu_is_told_where_pytorch_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, "x")
    known = SimpleNamespace(
        uuid="x", name="NVIDIA L4", pci_domain_id=0, pci_bus_id=27, pci_device_id=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    assert visible_gpus("cuda")[0].board == "00:1b:00"
