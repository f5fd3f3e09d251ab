"""Describe devices, for profiles without them: peaks from data sheets, and the share of them that operations achieve.

A device is one of the table, found by its name there or by what the driver calls it, or is described in a file
(`device_file`). No pydantic here: the help of the command line lists the table, and shows at once.

Peaks are dense (no sparsity), at boost clock. Sources:

    titan-x         NVIDIA GeForce GTX Titan X (Maxwell, GM200): 3072 cores x 2 x 1.089 GHz, 336.5 GB/s, 12 GB
    titan-x-pascal  NVIDIA Titan X (Pascal, GP102): 3584 cores x 2 x 1.531 GHz, 480 GB/s, 12 GB
    p100            NVIDIA Tesla P100 data sheet (2016), SXM2: 10.6 / 21.2 TFLOPS single / half, 732 GB/s
    v100            NVIDIA V100 data sheet (2018), SXM2: 15.7 single, 125 tensor (half), 900 GB/s, 16 GB
    v100-pcie       the same, PCIe: 14 single, 112 tensor
    a100, a100-80gb NVIDIA A100 data sheet (2021), SXM: 19.5 single, 156 TF32, 312 half; 1,555 and 2,039 GB/s
    h100            NVIDIA H100 data sheet (2022), SXM: 67 single, 494.7 TF32, 989.4 half, 3,350 GB/s
    h200            NVIDIA H200 data sheet (2023), SXM: the H100's arithmetic, 4,800 GB/s, 141 GB
    gh200           NVIDIA GH200 data sheet (2023), 96 GB: the H100's arithmetic, 4,000 GB/s
    b200            NVIDIA Blackwell data sheet (2024), a GPU of HGX B200: 75 single, 1,125 TF32, 2,250 half, 7,700 GB/s
    t4              NVIDIA T4 data sheet (2019): 8.1 single, 65 tensor (half), 320 GB/s
    a10             NVIDIA A10 data sheet (2021): 31.2 single, 62.5 TF32, 125 half, 600 GB/s
    a10g            NVIDIA A10G data sheet (2021, for AWS): 35 single, 35 TF32, 70 half, 600 GB/s
    a40             NVIDIA A40 data sheet (2021): 37.4 single, 74.8 TF32, 149.7 half, 696 GB/s
    a6000           NVIDIA RTX A6000 data sheet (2020): 38.7 single, 77.4 TF32, 154.8 half, 768 GB/s
    l4              NVIDIA L4 data sheet (2023): 30.3 single, 60 TF32, 121 half, 300 GB/s
    l40s            NVIDIA L40S data sheet (2023): 91.6 single, 183 TF32, 362 half, 864 GB/s
    rtx-3090        NVIDIA GA102 white paper (2020): 35.6 single and TF32, 71 half summed in single, 936 GB/s
    rtx-4090        NVIDIA Ada white paper (2022): 82.6 single and TF32, 165.2 half summed in single, 1,008 GB/s
    rtx-5090        NVIDIA RTX Blackwell white paper (2025): 104.8 single and TF32, 209.5 half, 1,792 GB/s
    mi300x          AMD Instinct MI300X data sheet (2023): 163.4 single, 653.7 TF32, 1,307.4 half, 5,300 GB/s
    cpu             one core with two AVX-512 multiply-add units at 4 GHz: 2 x 2 x 16 x 4e9 = 256 GFLOP/s

"Achieved" is the share of the peak that PyTorch's kernels reach on large operations, by class. The GPUs' shares are the
same for all of them, and were set so that the V100 meets the times of PipeDream's published profiles
(benchmarks/estimate says how well). The CPU's were fitted to profiles measured on an AMD EPYC (Zen 5) core. Calibration
(`calibrate`) fits them to another device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from planner.errors import InputError

DType = Literal["float32", "tf32", "bfloat16", "float16"]
DTYPE_ALIASES: Mapping[str, DType] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DTYPES: tuple[DType, ...] = get_args(DType)

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
        memory_bytes: of the device; None for a CPU.
        achieved_arithmetic: share of the peak, by class. Above 1 where the algorithm multiplies less than the
            definition does: Winograd's needs 2.25 times fewer multiplications for 3x3 (Lavin & Gray 2016).
        achieved_bandwidth: share of the bandwidth, by class. Above 1 where tensors stay in caches.
        launch_s: fixed time of one operation: dispatch on a CPU, start and end of a kernel on a GPU.
        dispatch_s: of a GPU's host, to launch one kernel; it runs ahead of the device while that is busy.
        processors: streaming multiprocessors or compute units, over which a GPU spreads the tiles of a product; None
            for a CPU.
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

    def at_clock(self, share: float) -> DeviceSpec:
        """Return the device with its processors at this share of their boost clock; the memory keeps its own."""
        return replace(self, peak_flops_per_s={name: share * peak for name, peak in self.peak_flops_per_s.items()})

    def peak(self, dtype: DType) -> float:
        """Return the arithmetic operations per second; TF32 is single precision where a device has no TF32."""
        return self.peak_flops_per_s.get(dtype, self.peak_flops_per_s["float32"])


_GPU_ARITHMETIC: ComputeShares = {"gemm": 0.87, "conv": 0.71, "winograd": 1.4, "recurrent": 0.55, "attention": 0.5}
_GPU_BANDWIDTH: Mapping[OpClass, float] = {
    "gemm": 0.85,
    "conv": 0.75,
    "winograd": 0.75,
    "recurrent": 0.5,
    "attention": 0.85,
    "pointwise": 0.85,
    "special": 0.8,
    "random": 0.7,
    "norm": 0.7,
    "pool": 0.7,
    "gather": 0.7,
    "update": 0.8,
}
_GPU_LAUNCH_S = 5e-6
_GPU_DISPATCH_S = 6e-6

_CPU_ARITHMETIC: ComputeShares = {"gemm": 0.45, "conv": 0.55, "winograd": 0.9, "recurrent": 1.0, "attention": 0.4}
_CPU_BANDWIDTH: Mapping[OpClass, float] = {
    "gemm": 0.35,
    "conv": 0.6,
    "winograd": 0.6,
    "recurrent": 1.0,
    "attention": 0.6,
    "pointwise": 1.5,
    "special": 0.4,
    "random": 0.035,
    "norm": 0.3,
    "pool": 0.07,
    "gather": 0.65,
    "update": 2.0,
}
_CPU_LAUNCH_S = 7e-6

_GIB = 2**30


def _gpu(name: str, processors: int, memory_gib: int, bandwidth: float, **peaks_tflops: float) -> DeviceSpec:
    """Return a GPU, given its bandwidth in GB/s and its peaks in TFLOP/s; half stands for both types of 16 bits."""
    single = peaks_tflops["single"]
    peaks = {"float32": single, "tf32": single} | peaks_tflops
    if "half" in peaks:
        peaks |= dict.fromkeys(("bfloat16", "float16"), peaks["half"])
    return DeviceSpec(
        name=name,
        kind="cuda",
        peak_flops_per_s={dtype: peaks[dtype] * 1e12 for dtype in DTYPES if dtype in peaks},
        bandwidth_bytes_per_s=bandwidth * 1e9,
        memory_bytes=memory_gib * _GIB,
        achieved_arithmetic=_GPU_ARITHMETIC,
        achieved_bandwidth=_GPU_BANDWIDTH,
        launch_s=_GPU_LAUNCH_S,
        dispatch_s=_GPU_DISPATCH_S,
        processors=processors,
    )


DEVICES: Mapping[str, DeviceSpec] = {
    "cpu": DeviceSpec(
        name="one AVX-512 core",
        kind="cpu",
        peak_flops_per_s={"float32": 256e9, "bfloat16": 512e9},
        bandwidth_bytes_per_s=30e9,
        memory_bytes=None,
        achieved_arithmetic=_CPU_ARITHMETIC,
        achieved_bandwidth=_CPU_BANDWIDTH,
        launch_s=_CPU_LAUNCH_S,
    ),
    "titan-x": _gpu("NVIDIA GeForce GTX Titan X 12 GB", 24, 12, 336.5, single=6.69),
    "titan-x-pascal": _gpu("NVIDIA Titan X (Pascal) 12 GB", 28, 12, 480, single=10.97),
    "p100": _gpu("NVIDIA Tesla P100 SXM2 16 GB", 56, 16, 732, single=10.6, float16=21.2),
    "v100": _gpu("NVIDIA Tesla V100 SXM2 16 GB", 80, 16, 900, single=15.7, float16=125),
    "v100-pcie": _gpu("NVIDIA Tesla V100 PCIe 16 GB", 80, 16, 900, single=14.0, float16=112),
    "t4": _gpu("NVIDIA T4 16 GB", 40, 16, 320, single=8.1, float16=65),
    "a100": _gpu("NVIDIA A100 SXM 40 GB", 108, 40, 1555, single=19.5, tf32=156, half=312),
    "a100-80gb": _gpu("NVIDIA A100 SXM 80 GB", 108, 80, 2039, single=19.5, tf32=156, half=312),
    "a10": _gpu("NVIDIA A10 24 GB", 72, 24, 600, single=31.2, tf32=62.5, half=125),
    "a10g": _gpu("NVIDIA A10G 24 GB", 80, 24, 600, single=35, tf32=35, half=70),
    "a40": _gpu("NVIDIA A40 48 GB", 84, 48, 696, single=37.4, tf32=74.8, half=149.7),
    "a6000": _gpu("NVIDIA RTX A6000 48 GB", 84, 48, 768, single=38.7, tf32=77.4, half=154.8),
    "l4": _gpu("NVIDIA L4 24 GB", 58, 24, 300, single=30.3, tf32=60, half=121),
    "l40s": _gpu("NVIDIA L40S 48 GB", 142, 48, 864, single=91.6, tf32=183, half=362),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090 24 GB", 82, 24, 936, single=35.6, half=71),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090 24 GB", 128, 24, 1008, single=82.6, half=165.2),
    "rtx-5090": _gpu("NVIDIA GeForce RTX 5090 32 GB", 170, 32, 1792, single=104.8, half=209.5),
    "h100": _gpu("NVIDIA H100 SXM 80 GB", 132, 80, 3350, single=67, tf32=494.7, half=989.4),
    "h200": _gpu("NVIDIA H200 SXM 141 GB", 132, 141, 4800, single=67, tf32=494.7, half=989.4),
    "gh200": _gpu("NVIDIA GH200 96 GB", 132, 96, 4000, single=67, tf32=494.7, half=989.4),
    "b200": _gpu("NVIDIA B200 180 GB", 148, 180, 7700, single=75, tf32=1125, half=2250),
    "mi300x": _gpu("AMD Instinct MI300X 192 GB", 304, 192, 5300, single=163.4, tf32=653.7, half=1307.4),
}


def device_spec(name: str, dtype: DType) -> DeviceSpec:
    """Return the device of that name.

    Raises:
        InputError: when the table has no such device, or the device no such arithmetic.
    """
    spec = DEVICES.get(name.lower())
    if spec is None:
        known = ", ".join(DEVICES)
        raise InputError(
            f"there is no estimate for device '{name}'",
            hint=f"known are {known}; describe others in a file, and give it as `device_file`",
        )
    if dtype not in spec.peak_flops_per_s and dtype != "tf32":
        known = ", ".join(spec.peak_flops_per_s)
        raise InputError(f"device '{name}' has no {dtype} arithmetic in the table", hint=f"give `dtype` one of {known}")
    return spec


def parse_dtype(text: str) -> DType:
    """Return the data type of that name; "bf16" and "fp16" are names, too.

    Raises:
        InputError: for any other word.
    """
    name = DTYPE_ALIASES.get(text, text)
    for dtype in DTYPES:
        if dtype == name:
            return dtype
    raise InputError(f"'{text}' is not a data type of estimates", hint=f"give one of {', '.join(DTYPES)}")


# As torch.cuda reports them, without the maker. Boards of other power or fewer units (H100 PCIe, RTX 3090 Ti) have
# other peaks, so each name fits whole.
_REPORTED: Mapping[str, str] = {
    "titan-x": r"GeForce GTX TITAN X",
    "titan-x-pascal": r"TITAN X \(Pascal\)",
    "p100": r"Tesla P100-SXM2-16GB",
    "v100": r"Tesla V100-SXM[23]-(16|32)GB(-LS)?",
    "v100-pcie": r"Tesla V100-PCIE-(16|32)GB",
    "t4": r"(Tesla )?T4",
    "a100": r"A100-(SXM4|PCIE)-40GB",
    "a100-80gb": r"A100-SXM4-80GB|A100 80GB PCIe",
    "a10": r"A10",
    "a10g": r"A10G",
    "a40": r"A40",
    "a6000": r"RTX A6000",
    "l4": r"L4",
    "l40s": r"L40S",
    "rtx-3090": r"GeForce RTX 3090",
    "rtx-4090": r"GeForce RTX 4090",
    "rtx-5090": r"GeForce RTX 5090",
    "h100": r"H100 80GB HBM3",
    "h200": r"H200",
    "gh200": r"GH200 (96|120|480)GB",
    "b200": r"B200",
    "mi300x": r"(AMD )?Instinct MI300X.*",
}


def find_device(name: str) -> DeviceSpec | None:
    """Return the device of that name; None for one that the table does not have."""
    plain = name.removeprefix("NVIDIA ")
    return next(
        (
            spec
            for key, spec in DEVICES.items()
            if name == spec.name or (key in _REPORTED and re.fullmatch(_REPORTED[key], plain))
        ),
        None,
    )
