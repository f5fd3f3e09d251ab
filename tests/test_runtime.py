"""The seam: what a kind of device does is asked of one place, which uses the module that PyTorch
has for the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import InputError
from planner.profiler.this_machine import (
    describe_device,
    describe_machine,
    gpus_of_kinds,
    parse_device,
)
from planner.runtime import Accelerator, Runtime, check_kind, kinds_here, known_kinds, runtime_of
from planner.workers.place import (
    Place,
    check_backend,
    choose_place,
    gpus_here,
    kind_here,
    own_seat,
    take,
    visible_gpus,
)
from tests.runtimes import PretendedDevice, registered

CPU = torch.device("cpu")
GB = 10**9


class Module:
    """PyTorch's module for a kind of device of which there are two."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.current = 0

    def __getattr__(self, name: str) -> Any:
        def note(*given: Any) -> nullcontext[None]:
            self.calls.append((name, given[0] if given else None))
            return nullcontext()

        return note

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 1

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name="Max 1550", total_memory=64 * GB, uuid=f"id {device.index}")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 60 * GB, 64 * GB

    def memory_reserved(self, device: torch.device) -> int:
        return 3 * GB


@pytest.fixture
def xpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Module]:
    """Two XPUs, as PyTorch would tell of them."""
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True)
    with registered("xpu", Accelerator("xpu")):
        yield module


def test_memory_is_reserved_as_far_as_there_is_some(
    xpus: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: taken.append(size))
    runtime, device = runtime_of("xpu"), torch.device("xpu", 0)
    # Beside it memory for small requests. What a few messages need is taken, too.
    for asked, large, small in (
        (10 * GB, 10 * GB, 64),
        (100 * GB, 54 * GB, 64),
        (3 << 20, 3 << 20, 3),
        (64, 64, 1),
    ):
        taken.clear()
        runtime.reserve(device, asked)
        assert taken == [large, *[1 << 20] * small]
    taken.clear()
    runtime.reserve(device, 0)
    assert not taken


def test_a_kind_that_pytorch_has_a_module_for_is_used_by_its_name(
    xpus: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert (kinds_here(), kind_here(), gpus_here()) == (("xpu", "cpu"), "xpu", 2)
    first, second = gpus_of_kinds(kinds_here())
    assert (first, second) == (torch.device("xpu", 0), torch.device("xpu", 1))
    seats = [own_seat(), own_seat().model_copy(update={"rank": 1})]
    assert [gpu.uuid for gpu in seats[0].gpus] == ["id 0", "id 1"]
    place = choose_place(seats, 1, None, None)
    assert place == Place(second, second)
    assert (place.kind, place.backend, place.device_name) == ("xpu", "xccl", "Max 1550")
    assert choose_place(seats, 1, "xpu", "gloo") == Place(second, CPU)
    with pytest.raises(
        InputError, match="`backend=nccl` sends from GPUs, and `device=xpu` on others"
    ):
        check_backend("xpu", "nccl")
    take(place)
    assert ("set_device", second) in xpus.calls
    found = describe_device(parse_device("xpu:1"), 1, 1)
    assert (found.kind, found.name, found.memory_bytes, found.context_bytes) == (
        "xpu",
        "Max 1550",
        64 * GB,
        1 * GB,
    )
    assert "xpu:1  Max 1550, 64 GB" in describe_machine()
    with pytest.raises(InputError, match="there is no device 'xpu:2': PyTorch sees 2 GPUs"):
        parse_device("xpu:2")


def test_each_question_goes_to_the_module(xpus: Module) -> None:
    runtime, device = runtime_of("xpu"), torch.device("xpu", 1)
    assert runtime.asynchronous
    assert runtime.current_index() == 1
    runtime.synchronize(device)
    runtime.reset_peak(device)
    with torch.random.fork_rng(devices=[]):
        runtime.seed(device, 7)
        # a module may draw on the host
        assert torch.initial_seed() == 7
    runtime.empty_cache()
    asked = [
        ("synchronize", device),
        ("reset_peak_memory_stats", device),
        ("device", device),
        ("manual_seed", 7),
    ]
    assert xpus.calls == [*asked, ("empty_cache", None)]


def test_a_cpu_has_done_everything_when_a_call_returns() -> None:
    runtime = runtime_of(CPU)
    assert not runtime.asynchronous
    start, end = runtime.event(), runtime.current_stream(CPU).record_event()
    start.record()
    assert end.query()
    with runtime.on(runtime.stream(CPU)):
        assert end.elapsed_time(start) >= 0
    values = torch.arange(3)
    assert runtime.pin(values) is values
    assert runtime.copied(values, CPU) is values
    with runtime.random_state_kept(CPU):
        before = torch.get_rng_state()
        runtime.seed(CPU, 1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_registered_kind_is_found_at_once_and_may_be_a_cpu() -> None:
    device = PretendedDevice()
    with registered("cpu", device):
        assert runtime_of(CPU) is device
        assert runtime_of(torch.device("meta")) is device
    assert type(runtime_of(CPU)) is Runtime


@pytest.mark.skipif(kinds_here() != ("cpu",), reason="the sentence names what is here")
def test_an_unknown_kind_is_refused_in_one_sentence() -> None:
    for kind in known_kinds():
        check_kind(kind)
    expected = (
        "`device=tpu` is no kind of device: PyTorch offers cpu here, could offer cuda, xpu, mtia, "
        "cpu, and of all "
        "these cpu and cuda have been tried with planner\nhint: give one of these kinds; GPUs of "
        "ROCm are cuda, too"
    )
    for refused in (check_kind, parse_device, runtime_of, visible_gpus):
        with pytest.raises(InputError) as caught:
            refused("tpu")
        assert str(caught.value) == expected
