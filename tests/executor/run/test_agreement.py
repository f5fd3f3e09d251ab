"""What workers check of each other before they train: for hosts and GPUs that are made up."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported by a star import

from planner.errors import PlanError
from planner.executor.run.agreement import (
    check_gpus,
    check_same_job,
    check_servers,
    device_kind,
    same_for_all,
    take_place,
)
from planner.formats.cluster import Cluster, DeviceKind, flat_cluster, hierarchical_cluster
from planner.formats.names import DeviceType
from planner.formats.plan import Plan
from planner.formats.profile import Device
from planner.workers.heartbeat import Heartbeat
from planner.workers.job import Job
from planner.workers.place import Gpu, Place, Seat, own_seat
from tests.executor.models import write_model
from tests.executor.plans import make_plan, structural_profile
from tests.workers.fake_gpus import fake_gpus


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan "1-1", made for a CPU."""
    path = write_model(tmp_path_factory.mktemp("setup"), "language", "momentum")
    return make_plan(structural_profile(path, 4), (1, 1))


def with_device(plan: Plan, kind: str) -> Plan:
    return plan.model_copy(update={"device": Device(kind=kind, name="some device")})


def with_cluster(plan: Plan, cluster: Cluster) -> Plan:
    return plan.model_copy(update={"cluster": cluster})


def seats_on(*hosts: int, gpus: str = "") -> list[Seat]:
    """Return a worker on each of these hosts, with a GPU of each of these names."""
    names = gpus or "x" * len(hosts)
    return [
        Seat(
            rank=rank,
            host=f"host{host}",
            server=host,
            gpus=(Gpu(uuid=str(rank), name=names[rank]),),
        )
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0, 1, 1, 1, 1), (0,) * 8, (0, 0, 0, 0, 1, 1)])
def test_hosts_are_the_plans_servers(plan: Plan, hosts: tuple[int, ...]) -> None:
    check_servers(with_cluster(plan, hierarchical_cluster((4, 2), (1e10, 1e9))), seats_on(*hosts))


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 2, 3), (0, 0, 0, 0)])
def test_any_hosts_will_do_where_all_links_are_alike(plan: Plan, hosts: tuple[int, ...]) -> None:
    check_servers(with_cluster(plan, flat_cluster(4, 1e9)), seats_on(*hosts))


@pytest.mark.parametrize(
    "hosts",
    [
        (0, 0, 1, 1, 2, 2, 3, 3),
        (0, 0, 0, 0, 0, 0, 1, 1),
        (0, 1, 0, 1, 0, 1, 0, 1),  # as many, but ranks are dealt in turn
    ],
)
def test_other_hosts_than_the_plans_servers_are_refused(plan: Plan, hosts: tuple[int, ...]) -> None:
    cluster = hierarchical_cluster((4, 2), (1e10, 1e9))
    found = ", ".join(map(str, hosts))
    with pytest.raises(
        PlanError, match=rf"4 consecutive workers on each server, and the hosts .* are {found}\n"
    ):
        check_servers(with_cluster(plan, cluster), seats_on(*hosts))


def test_different_gpus_are_refused_unless_the_plan_knows_of_them(plan: Plan) -> None:
    check_gpus(plan, seats_on(0, 0, 1))
    mixed = seats_on(0, 0, 1, gpus="xxy")
    with pytest.raises(
        PlanError, match=r"^worker 2 \(host1\) would compute on y, and .* worker 0 \(host0\) has x"
    ):
        check_gpus(plan, mixed)
    kinds = (DeviceKind(count=2), DeviceKind(count=1, speed=0.5))
    check_gpus(with_cluster(plan, flat_cluster(3, 1e9).model_copy(update={"kinds": kinds})), mixed)
    for device, gpus, message in (
        (
            "y",
            "xxx",
            r"^worker 2 \(host1\) would compute on x, and the plan was made for y there: "
            r"workers 2 to 2",
        ),
        (None, "xyy", r"^worker 1 \(host0\) would compute on y, and the plan was made for x there"),
    ):
        kinds = (DeviceKind(count=2), DeviceKind(count=1, name="fast", device=device))
        with pytest.raises(PlanError, match=message):
            check_gpus(
                with_cluster(plan, flat_cluster(3, 1e9).model_copy(update={"kinds": kinds})),
                seats_on(0, 0, 1, gpus=gpus),
            )


def test_a_worker_takes_its_gpu_before_anything_else(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = fake_gpus(monkeypatch, "x", "y")
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    monkeypatch.setattr("planner.executor.run.agreement.worker_store", lambda _: store)
    monkeypatch.setenv("WORLD_SIZE", "2")
    job = Job(model="model.py", plan=with_device(plan, "cuda"))
    monkeypatch.setenv("RANK", "1")  # the other worker, on the same host
    store.set("seat/1/1", own_seat(same_for_all(job)).model_dump_json())
    monkeypatch.setenv("RANK", "0")
    gpu = torch.device("cuda", 0)
    assert take_place(job, Heartbeat()) == Place(gpu, gpu)
    assert current == [gpu]


def test_workers_that_began_differently_are_named() -> None:
    said = [
        {"torch": "torch 2.6", "steps": "`steps=5`"},
        {"torch": "torch 2.6", "steps": "`steps=6`"},
    ]
    seats = [
        seat.model_copy(update={"same": same})
        for seat, same in zip(seats_on(0, 1), said, strict=True)
    ]
    with pytest.raises(
        PlanError, match=r"^worker 1 \(host1\) began with `steps=6`, and worker 0 \(host0\) with"
    ):
        check_same_job(seats)
    check_same_job(seats[:1] * 2)


@pytest.mark.parametrize(
    ("planned", "asked", "kind"),
    [
        ("cpu", None, "cpu"),
        ("cpu", "cpu", "cpu"),
        ("cuda", None, "cuda"),
        ("unknown", None, None),  # imported: what is there
        ("unknown", "cpu", "cpu"),
    ],
)
def test_training_is_on_the_kind_of_device_that_the_plan_was_made_for(
    plan: Plan, planned: str, asked: DeviceType | None, kind: DeviceType | None
) -> None:
    assert device_kind(Job(model="model.py", plan=with_device(plan, planned), device=asked)) == kind


def test_another_kind_of_device_is_refused(plan: Plan, tmp_path: Path) -> None:
    job = Job(model=str(tmp_path), plan=plan, device="cuda")
    with pytest.raises(
        PlanError, match=r"the plan was made for cpu .*\nhint: profile the model with `device=cuda`"
    ):
        device_kind(job)
