"""What a kind of device does: streams, events, memory, seeds. Nothing else asks which kind a device
is.

A call on an *asynchronous* device returns before the work is done, and events tell how far the
device has come. A CPU has done the work when the call returns. CUDA, ROCm (which PyTorch also calls
"cuda"), XPU and other kinds are used through the module that PyTorch has for each; `register` adds
a kind, or replaces one.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.errors import InputError
from planner.formats.names import GPU_KINDS

TRIED = ("cpu", "cuda")  # kinds on which this package has ever trained anything
_MOST_OF_FREE = 0.9  # of a device's free memory, that `reserve` takes
# beside it for small requests, and what these are at most
_SMALL_BYTES = 64 << 20
_SMALL_PIECE_BYTES = 1 << 20


class Event(Protocol):
    """A mark at the end of the current stream, once recorded; `elapsed_time` in milliseconds."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Stream(Protocol):
    """A queue of operations, which the device does in order."""

    def wait_event(self, event: Any, /) -> None: ...
    def record_event(self) -> Event: ...
    def synchronize(self) -> None: ...


class HostEvent:
    """A moment on the host, which has done what was before it."""

    s = 0.0  # of `time.perf_counter`

    def record(self) -> None:
        self.s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end_event: "HostEvent", /) -> float:
        return (end_event.s - self.s) * 1e3


class HostStream:
    """The order of the host's calls."""

    def wait_event(self, event: Event, /) -> None:
        return

    def record_event(self) -> Event:
        """Return an event that is recorded now: on a CPU nothing is left to wait for."""
        event = HostEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        return


class Runtime:
    """What a kind of device does; here a CPU, which has done all that it was given when the call
    returns.
    """

    asynchronous = False
    counts_memory = False  # whether its allocator tells what is allocated, and was at most
    backend = "gloo"  # of torch.distributed, for messages from this kind's memory

    def available(self) -> bool:
        """Return whether PyTorch sees such a device."""
        return True

    def count(self) -> int:
        """Return how many devices of this kind PyTorch sees."""
        return 1

    def current_index(self) -> int:
        """Return the number of the current device; 0 where there is none."""
        return 0

    def properties(self, device: torch.device) -> Any:
        """Return what PyTorch tells of a device, in attributes that differ between kinds."""
        return None

    def set_device(self, device: torch.device) -> None:
        """Make a device the current one of this process."""

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which a device is the current one."""
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        """Let the host wait until a device has done all that it was given."""

    def event(self, *, timing: bool = False) -> Event:
        """Return an event, to be recorded; `timing` where its time is asked for."""
        return HostEvent()

    def anchor(self, device: torch.device) -> tuple[Event, float]:
        """Record an event, and return it with its time on `time.perf_counter`'s clock; waits for
        the device.
        """
        event = self.event(timing=True)
        event.record()
        self.synchronize(device)
        return event, time.perf_counter() if self.asynchronous else cast("HostEvent", event).s

    def stream(self, device: torch.device) -> Stream:
        """Return a stream beside the device's others."""
        return HostStream()

    def current_stream(self, device: torch.device) -> Stream:
        """Return the stream that gets what is called now."""
        return HostStream()

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Return a context in which `stream` is the current one."""
        return nullcontext()

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Keep a tensor's memory, once it is freed, until what `stream` has been given by then is
        done.
        """

    def pinned(self, size_bytes: int) -> Tensor:
        """Return bytes of the host's memory, which this kind of device copies without the host."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, tensor: Tensor) -> Tensor:
        """Return the values of a tensor of the host in pinned memory: the tensor itself, if it is
        there.
        """
        return tensor

    def copied(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a tensor of the host on `device`; from pinned memory the host does not wait for
        the copy.
        """
        return tensor.to(device, non_blocking=tensor.is_pinned())

    def reserve(self, device: torch.device, size_bytes: int) -> None:
        """Let the allocator take memory now, which it then gives to the current stream without
        asking the device.
        """

    # These are where the kind `counts_memory`.

    def allocated_bytes(self, device: torch.device) -> int:
        """Return what tensors take now, by the requests that the host made."""
        raise NotImplementedError

    def peak_bytes(self, device: torch.device) -> int:
        """Return the most that tensors took since `reset_peak`."""
        raise NotImplementedError

    def reset_peak(self, device: torch.device) -> None:
        raise NotImplementedError

    def reserved_bytes(self, device: torch.device, *, peak: bool = False) -> int:
        """Return what the allocator holds of the device, now or at most."""
        raise NotImplementedError

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Return the device's memory that nobody uses, and all of it."""
        raise NotImplementedError

    def empty_cache(self) -> None:
        """Give back to the device what the allocator holds and no tensor uses."""

    def seed(self, device: torch.device, seed: int) -> None:
        """Seed the default generators of the CPU and of `device`."""
        torch.default_generator.manual_seed(seed)

    def random_state(self, device: torch.device) -> Tensor:
        """Return the state of the default generator of `device`."""
        return torch.get_rng_state()

    def random_state_kept(self, device: torch.device) -> AbstractContextManager[None]:
        """Restore the states of the default generators of the CPU and of `device`, if it is there,
        afterwards.
        """
        return torch.random.fork_rng(devices=[])


class Accelerator(Runtime):
    """A kind of device that works beside the host, through PyTorch's module for it."""

    asynchronous = True
    counts_memory = True

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._module: Any = torch.get_device_module(kind)
        self.backend = dist.Backend.default_device_backend_map.get(kind, Runtime.backend)

    def available(self) -> bool:
        return bool(self._module.is_available())

    def count(self) -> int:
        if not self.available():
            return 0
        return int(self._module.device_count())

    def current_index(self) -> int:
        if not self.available():
            return 0
        return int(self._module.current_device())

    def properties(self, device: torch.device) -> Any:
        return self._module.get_device_properties(device)

    def set_device(self, device: torch.device) -> None:
        self._module.set_device(device)

    def current(self, device: torch.device) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._module.device(device))

    def synchronize(self, device: torch.device) -> None:
        self._module.synchronize(device)

    def event(self, *, timing: bool = False) -> Event:
        return cast("Event", self._module.Event(enable_timing=timing))

    def stream(self, device: torch.device) -> Stream:
        return cast("Stream", self._module.Stream(device))

    def current_stream(self, device: torch.device) -> Stream:
        return cast("Stream", self._module.current_stream(device))

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return cast("AbstractContextManager[object]", self._module.stream(stream))

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(stream)  # type: ignore[arg-type]

    def pinned(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def reserve(self, device: torch.device, size_bytes: int) -> None:
        # The allocator keeps what is freed here for this stream, and cuts what it is asked for from
        # it. Requests of up to 1 MiB have memory of their own. What does not fit is for training to
        # find out, which says so.
        free_bytes, _ = self.free_and_total_bytes(device)
        size_bytes = min(size_bytes, int(free_bytes * _MOST_OF_FREE))
        small = -(-min(size_bytes, _SMALL_BYTES) // _SMALL_PIECE_BYTES)
        sizes = []
        if size_bytes:
            sizes = [size_bytes, *[_SMALL_PIECE_BYTES] * small]
        # all at the same time
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        del held

    def allocated_bytes(self, device: torch.device) -> int:
        return self._requested_bytes(device, "current")

    def peak_bytes(self, device: torch.device) -> int:
        return self._requested_bytes(device, "peak")

    def _requested_bytes(self, device: torch.device, when: str) -> int:
        # A tensor may get a larger block than it asks for, and how much larger depends on what was
        # freed before.
        stats = self._module.memory_stats(device)
        return int(
            stats.get(f"requested_bytes.all.{when}", stats.get(f"allocated_bytes.all.{when}", 0))
        )

    def reset_peak(self, device: torch.device) -> None:
        self._module.reset_peak_memory_stats(device)

    def reserved_bytes(self, device: torch.device, *, peak: bool = False) -> int:
        return int(
            (self._module.max_memory_reserved if peak else self._module.memory_reserved)(device)
        )

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        free, total = self._module.mem_get_info(device)
        return int(free), int(total)

    def empty_cache(self) -> None:
        self._module.empty_cache()

    def seed(self, device: torch.device, seed: int) -> None:
        super().seed(device, seed)  # the user's modules may draw on the host
        with self.current(device):  # manual_seed seeds the current device only
            self._module.manual_seed(seed)

    def random_state(self, device: torch.device) -> Tensor:
        return cast("Tensor", self._module.get_rng_state(device))

    def random_state_kept(self, device: torch.device) -> AbstractContextManager[None]:
        # Without a list, fork_rng asks every device of the machine for its state, and so opens a
        # context on each.
        there = [device] if self.available() else []
        return torch.random.fork_rng(devices=there, device_type=self._kind)


_RUNTIMES: dict[str, Runtime] = {"cpu": Runtime()}


def register(kind: str, runtime: Runtime) -> None:
    """Use `runtime` for all devices of a kind from now on, in all threads; for "cpu", too."""
    _RUNTIMES[kind] = runtime


def runtime_of(device: torch.device | str) -> Runtime:
    """Return what the kind of `device` does; raise InputError for a kind that cannot be used
    anywhere.
    """
    kind = device.type if isinstance(device, torch.device) else device
    found = _RUNTIMES.get(kind)
    if found is None:
        if kind == "meta":  # nothing is computed there
            return _RUNTIMES["cpu"]
        check_kind(kind)
        found = _RUNTIMES[kind] = Accelerator(kind)
    return found


def known_kinds() -> tuple[str, ...]:
    """Return the kinds of device that this package can use, whether there is one here or not; "cpu"
    last.
    """
    # Private; nothing public tells the name that a plug-in has given itself.
    plug_in = torch._C._get_privateuse1_backend_name()
    names = (*GPU_KINDS, *([plug_in] if hasattr(torch, plug_in) else []), *_RUNTIMES)
    return (*(name for name in dict.fromkeys(names) if name != "cpu"), "cpu")


def kinds_here() -> tuple[str, ...]:
    """Return the kinds of device that PyTorch offers on this machine; "cpu" last."""
    return tuple(kind for kind in known_kinds() if runtime_of(kind).count())


def check_kind(kind: str) -> None:
    """Raise InputError for a kind of device that this package cannot use anywhere."""
    if kind not in known_kinds():
        here = " and ".join(kinds_here())
        tried = " and ".join(TRIED)
        problem = f"`device={kind}` is no kind of device: PyTorch offers {here} here, could offer "
        problem += (
            f"{', '.join(known_kinds())}, and of all these {tried} have been tried with planner"
        )
        raise InputError(problem, hint="give one of these kinds; GPUs of ROCm are cuda, too")


def address_of(tensor: Tensor) -> int:
    """Return what tells the tensor's storage from all others that exist."""
    return int(tensor.untyped_storage()._cdata)


def library_versions() -> str:
    """Return the versions of what PyTorch was built for, as "CUDA 12.8, NCCL 2.27.3"."""
    others = {"ROCm": torch.version.hip, "XPU": torch.version.xpu}
    found = dist.is_nccl_available() and bool(torch.version.cuda or torch.version.hip)
    nccl = "none"
    if found:
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        nccl = ".".join(map(str, version))
    more = "".join(f", {name} {version}" for name, version in others.items() if version)
    return f"CUDA {torch.version.cuda or 'none'}, NCCL {nccl}{more}"
