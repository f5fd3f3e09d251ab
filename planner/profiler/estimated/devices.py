"""Describe devices, for profiles without them: peaks from data sheets, and the share of them that
operations achieve.

A device is one of the table, found by its name there or by what the driver calls it, or is
described in a file (`estimate.DeviceFile`). The table of GPUs is `gpus.json`. No pydantic here: the
help of the command line lists it, and shows at once.

Peaks are dense (no sparsity), at boost clock. They are those of the makers' data sheets: P100
(2016), V100 (2018), T4 (2019), A6000 (2020), A100, A10, A10G (for AWS) and A40 (2021), H100 (2022,
SXM), L4, L40S, H200, GH200 (96 GB) and MI300X (2023), B200 (2024, one of HGX B200), MI325X (2024),
GB200 (2024, one of GB200 NVL72), B300 (2025, one of HGX B300) and MI355X (2025); and of NVIDIA's
white papers on GA102 (2020), Ada (2022), RTX Blackwell and RTX PRO Blackwell (2025), whose products
in half precision are summed in single. The Titan X has 3072 cores x 2 x 1.089 GHz (Maxwell) or
3584 x 2 x 1.531 GHz (Pascal); the CPU is a core with
two AVX-512 multiply-add units: 2 x 2 x 16 x 4 GHz = 256 GFLOP/s.

"Achieved" is the share of the peak that PyTorch's kernels reach on large operations, by class.
Products, fused attention and pointwise kernels have those that were measured on an architecture
(benchmarks/gpu_truth/README.md has the sources): long products of H100, B200 and L40S lower the
clock, which takes their share below the others'; the H200's are PyTorch 2.11's own, and the H100's
attention is FlashAttention-2. The GPUs' others are the same for all, and were set so that the V100
meets the times of PipeDream's published profiles (benchmarks/gpu_truth/estimate says how well). The
CPU's were fitted to profiles measured on an AMD EPYC (Zen 5) core
(`benchmarks/gpu_truth/fit_device.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from planner.errors import InputError, UnitError, did_you_mean
from planner.formats.names import EightBits
from planner.profiler.estimated.eight_bit_gpus import EIGHT_BITS, RATES, EightBitRates
from planner.units import parse_seconds

DType = Literal["float32", "tf32", "bfloat16", "float16"]
_FAMILIES = ("nvidia", "geforce", "tesla", "amd", "instinct")  # that people put before a name
DTYPES: tuple[DType, ...] = get_args(DType)
Precision = DType | EightBits  # of an operation
_ALIASES: Mapping[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# Classes that compute have an achieved share of the arithmetic, and one of the bandwidth.
ComputeClass = Literal["gemm", "conv", "winograd", "recurrent", "attention"]
# Classes that move so many bytes per operation that the bandwidth alone decides their time.
MemoryClass = Literal["pointwise", "special", "random", "norm", "pool", "gather", "update"]
OpClass = Literal[ComputeClass, MemoryClass]
COMPUTE_CLASSES: tuple[ComputeClass, ...] = get_args(ComputeClass)
MEMORY_CLASSES: tuple[MemoryClass, ...] = get_args(MemoryClass)
ComputeShares = Mapping[ComputeClass, float]
OP_CLASSES: tuple[OpClass, ...] = (*COMPUTE_CLASSES, *MEMORY_CLASSES)


@dataclass(frozen=True)
class DeviceSpec:
    """A device's peaks, and the shares of them that operations achieve.

    Attributes:
        name: for people.
        kind: "cpu" or "cuda", as in a profile.
        peak_flops_per_s: by data type; a missing type is not supported.
        bandwidth_bytes_per_s: of the memory.
        memory_bytes: of the device that a process can use; None for a CPU.
        achieved_arithmetic: share of the peak, by class. Above 1 where the algorithm multiplies
            less than the definition does: Winograd's needs 2.25 times fewer multiplications for 3x3
            (Lavin & Gray 2016).
        achieved_bandwidth: share of the bandwidth, by class. Above 1 where tensors stay in caches.
        launch_s: fixed time of one operation: dispatch on a CPU, start and end of a kernel on a
            GPU.
        dispatch_s: of a GPU's host, to launch one kernel (`HOSTS`); it runs ahead of the device
            while that is busy.
        processors: streaming multiprocessors or compute units, over which a GPU spreads the tiles
            of a product; None for a CPU.
        reported: pattern of the names that PyTorch gives it, without the maker. Boards of other
            power or fewer units (H100 PCIe, RTX 3090 Ti) have other peaks, so it fits the whole
            name.
        like: the device, for people, whose shares it has in place of those that nobody measured on
            it; None where its own were.
        eight_bits: rates of products in 8 bits; None where it has none that are known.
    """

    name: str
    kind: Literal["cpu", "cuda"]
    peak_flops_per_s: Mapping[DType, float]
    bandwidth_bytes_per_s: float
    memory_bytes: int | None
    achieved_arithmetic: ComputeShares
    achieved_bandwidth: Mapping[OpClass, float]
    launch_s: float
    dispatch_s: float = 0.0
    processors: int | None = None
    reported: str | None = None
    like: str | None = None
    eight_bits: EightBitRates | None = None

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def at_clock(self, share: float) -> "DeviceSpec":
        """Return the device with its processors at this share of their boost clock; the memory
        keeps its own.
        """
        return replace(
            self,
            peak_flops_per_s={name: share * peak for name, peak in self.peak_flops_per_s.items()},
            eight_bits=self.eight_bits and self.eight_bits.at_clock(share),
        )

    def peak(self, dtype: Precision) -> float:
        """Return the arithmetic operations per second; TF32 is single precision where a device has
        no TF32.
        """
        if dtype == "fp8" or dtype == "mxfp8":
            assert self.eight_bits is not None, "GPUs without are refused"
            return self.eight_bits.peak_flops_per_s
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["float32"])


# Shares that a GPU achieves, and a CPU core.
_ARITHMETIC: Mapping[ComputeClass, tuple[float, float]] = {
    "gemm": (0.87, 0.45),
    "conv": (0.71, 0.55),
    "winograd": (1.4, 0.9),
    "recurrent": (0.55, 1.0),
    "attention": (0.58, 0.4),
}
_BANDWIDTH: Mapping[OpClass, tuple[float, float]] = {
    "gemm": (0.85, 0.35),
    "conv": (0.75, 0.6),
    "winograd": (0.75, 0.6),
    "recurrent": (0.5, 1.0),
    "attention": (0.85, 0.6),
    "pointwise": (0.85, 1.5),
    "special": (0.8, 0.4),
    "random": (0.7, 0.035),
    "norm": (0.7, 0.3),
    "pool": (0.7, 0.07),
    "gather": (0.7, 0.65),
    "update": (0.8, 2.0),
}


# Of the nominal memory a process sees this share. PyTorch reports 39.4 to 39.6 of an A100's 40 GiB,
# 79.1 to 79.3 of 80, 23.7 of an RTX 4090's 24. The error correction of data centres' cards with
# GDDR6 takes a sixteenth besides: a T4 has 14.75 of 16 GiB, an L40S 44.4 to 44.5 of 48, and the
# driver shows 22.5 of an A10G's 24.
_USABLE, _CORRECTED = 0.985, 15 / 16


# Seconds of a host per launch of a kernel, by kind of program.
# eager: PyTorch's operations one by one, from Python. Training a small transformer on an H200's
# server takes 38 µs per
#   launch in float32 and under autocast, 44 all in bfloat16; decoding Llama-7B on an A100, without
#   gradients, 25 (Team PyTorch, "Accelerating Generative AI II", 2023: 25.5 tokens per second, in
#   1,580 launches as traced).
# fused, compiled: kernels that one call from C++ or from generated code launches: PyTorch's
# dispatch, a lower bound. graphs: forward and backward are captured once as CUDA graphs.
HOSTS: Mapping[str, float] = {"eager": 38e-6, "compiled": 6e-6, "fused": 6e-6, "graphs": 0.0}


def _read() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")
    )
    return table


def _gpu(
    peaks: dict[str, float],
    memory_gib: int,
    bandwidth: float,
    arithmetic: ComputeShares = MappingProxyType({}),
    moving: Mapping[OpClass, float] = MappingProxyType({}),
    *,
    corrected: bool = False,
    **known: Any,
) -> DeviceSpec:
    """Return a GPU, given its bandwidth in GB/s and its peaks in TFLOP/s; half stands for both
    types of 16 bits.

    `arithmetic` and `moving` are the shares that were measured on its architecture.
    """
    peaks = {"float32": peaks["single"], "tf32": peaks["single"]} | peaks
    if "half" in peaks:
        peaks |= dict.fromkeys(("bfloat16", "float16"), peaks["half"])
    return DeviceSpec(
        kind="cuda",
        peak_flops_per_s={dtype: peaks[dtype] * 1e12 for dtype in DTYPES if dtype in peaks},
        bandwidth_bytes_per_s=bandwidth * 1e9,
        memory_bytes=int(memory_gib * 1024 * _USABLE * (_CORRECTED if corrected else 1)) * 2**20,
        achieved_arithmetic={name: of_gpu for name, (of_gpu, _) in _ARITHMETIC.items()}
        | dict(arithmetic),
        achieved_bandwidth={name: of_gpu for name, (of_gpu, _) in _BANDWIDTH.items()}
        | dict(moving),
        launch_s=5e-6,
        dispatch_s=HOSTS["eager"],
        **known,
    )


def _gpus(table: Mapping[str, Mapping[str, Any]]) -> dict[str, DeviceSpec]:
    """Return the GPUs of the table. One whose kernels were not measured has the shares of the
    nearest kind whose were: a peak that nobody has reached says little.
    """
    found = {}
    for name, row in table.items():
        row = {**row, "eight_bits": RATES.get(name)}
        nearest = row.get("like")
        if nearest is None:
            found[name] = _gpu(**row)
            continue
        other = table[nearest]
        shares = {
            part: other.get(part, {}) | row.get(part, {}) for part in ("arithmetic", "moving")
        }
        found[name] = _gpu(**{**row, **shares, "like": other["name"]})

    return found


DEVICES: Mapping[str, DeviceSpec] = {
    "cpu": DeviceSpec(
        name="one AVX-512 core",
        kind="cpu",
        peak_flops_per_s={"float32": 256e9, "bfloat16": 512e9},
        bandwidth_bytes_per_s=30e9,
        memory_bytes=None,
        achieved_arithmetic={name: of_cpu for name, (_, of_cpu) in _ARITHMETIC.items()},
        achieved_bandwidth={name: of_cpu for name, (_, of_cpu) in _BANDWIDTH.items()},
        launch_s=7e-6,
    ),
    **_gpus(_read()),
}


def launch_of(host: str) -> float:
    """Return the seconds of a kind of host program per launch, or those that are given, as in 35us.

    Raises:
        InputError: for anything else.
    """
    if host in HOSTS:
        return HOSTS[host]
    try:
        return parse_seconds(host)
    except UnitError:
        message, hint = (
            f"'{host}' is no kind of host program",
            f"give one of {', '.join(HOSTS)}, or a time, as 35us",
        )
        raise InputError(message, hint=did_you_mean(host, HOSTS) + hint) from None


def known_as(name: str) -> str:
    """Return the name of a device in the table, also where it is written otherwise: "RTX4090",
    "4090" and "NVIDIA GeForce RTX 4090" are "rtx-4090"; another name comes back in lower case.
    """
    written = _letters_and_digits(name)
    return next((each for each in DEVICES if _letters_and_digits(each) == written), name.lower())


def _letters_and_digits(name: str) -> str:
    """Return what tells a name from others: "4090"; makers and families do not."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "".join(word for word in words if word not in _FAMILIES).removeprefix("rtx")


def device_spec(name: str, dtype: DType) -> DeviceSpec:
    """Return the device of that name.

    Raises:
        InputError: when the table has no such device, or the device no such arithmetic.
    """
    spec = DEVICES.get(known_as(name))
    if spec is None:
        raise InputError(
            f"there is no estimate for device '{name}'",
            hint=f"{did_you_mean(name, DEVICES)}known are {', '.join(DEVICES)}; describe others "
            f"in a file, and give it "
            "as `device_file`",
        )

    return supporting(spec, dtype, f"device '{name}'")


def check_kind(name: str, *, alone: bool) -> None:
    """Raise InputError for a GPU that is not in the table; CPUs are a kind that stands `alone`."""
    known = [gpu for gpu in DEVICES if gpu != "cpu"]
    if known_as(name) in known or (alone and name.lower() == "cpu"):
        return
    raise InputError(
        f"unknown GPU '{name}' in `gpu`",
        hint=f"{did_you_mean(name, known)}known are {', '.join(known)}",
    )


def usual_dtype(*names: str) -> DType:
    """Return the type that people train in on such GPUs: bfloat16 where all have it, else
    float16.
    """
    peaks = [device_spec(name, "float32").peak_flops_per_s for name in names]
    halves: tuple[DType, ...] = ("bfloat16", "float16")
    return next((dtype for dtype in halves if all(dtype in own for own in peaks)), "float32")


def supporting(spec: DeviceSpec, dtype: DType, label: str) -> DeviceSpec:
    """Return the device; raise InputError where it has no such arithmetic."""
    if dtype not in spec.peak_flops_per_s and dtype != "tf32":
        known = ", ".join(spec.peak_flops_per_s)
        raise InputError(f"{label} has no {dtype} arithmetic", hint=f"give `dtype` one of {known}")
    return spec


def with_eight_bits(spec: DeviceSpec, precision: EightBits) -> DeviceSpec:
    """Return the device; raise InputError where it has no products of that format."""
    rates = spec.eight_bits
    if rates is not None and precision in rates.formats:
        return spec
    having = [name for name, own in RATES.items() if precision in own.formats and name in DEVICES]
    known = f"GPUs with it are {', '.join(having)}"
    if rates is not None:
        known = f"give `precision={rates.formats[0]}`; {known}"
    raise InputError(
        f"{spec.name} has no products in {precision}",
        hint=f"leave out `precision` for {usual_half(spec)}; {known}",
    )


def usual_half(spec: DeviceSpec) -> str:
    """Return the type of 16 bits that people train in on a device, or single precision."""
    halves = ("bfloat16", "float16")
    return next((name for name in halves if name in spec.peak_flops_per_s), "float32")


def parse_precision(text: str) -> EightBits:
    """Return the format of products in 8 bits of that name.

    Raises:
        InputError: for any other word.
    """
    for precision in EIGHT_BITS:
        if precision == text.lower():
            return precision
    raise InputError(
        f"'{text}' is no format of products in 8 bits",
        hint=f"{did_you_mean(text, EIGHT_BITS)}give one of {', '.join(EIGHT_BITS)}; types of 16 "
        f"bits and more are given as `dtype`",
    )


def parse_dtype(text: str) -> DType:
    """Return the data type of that name; "bf16" and "fp16" are names, too.

    Raises:
        InputError: for any other word.
    """
    for dtype in DTYPES:
        if dtype == _ALIASES.get(text, text):
            return dtype
    raise InputError(
        f"'{text}' is not a data type of estimates", hint=f"give one of {', '.join(DTYPES)}"
    )


def find_device(name: str) -> DeviceSpec | None:
    """Return the device of that name, as the table or the driver calls it; None where the table has
    no such.
    """
    plain = name.removeprefix("NVIDIA ")
    for spec in DEVICES.values():
        if name == spec.name or (spec.reported is not None and re.fullmatch(spec.reported, plain)):
            return spec
    return None
