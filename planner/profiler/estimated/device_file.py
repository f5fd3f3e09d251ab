"""Devices that a file describes: fields of the JSON, and the device that they make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from planner.errors import InputError
from planner.formats.files import Record, load_record
from planner.profiler.estimated.devices import DEVICES, ComputeClass, DeviceSpec, DType, OpClass, supporting

_REMEDY = "see `DeviceFile` in planner/profiler/estimated/device_file.py for its fields"
_Positive = Annotated[float, Field(gt=0)]


class DeviceFile(Record):
    """A GPU, by its data sheet and, where they are known, the shares of it that it achieves.

    {"name": "My GPU", "peak_flops_per_s": {"float32": 30e12, "float16": 120e12},
     "bandwidth_bytes_per_s": 300e9, "memory_bytes": 24e9, "processors": 58, "clock": 0.5}
    """

    schema_version: Literal[1] = 1
    name: str
    peak_flops_per_s: dict[DType, _Positive]  # dense, at boost clock; "float32" at least
    bandwidth_bytes_per_s: _Positive
    memory_bytes: Annotated[int, Field(gt=0)]
    processors: Annotated[int, Field(gt=0)]  # streaming multiprocessors or compute units
    clock: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the boost clock that it keeps under load
    # By class of operation, in place of the table's.
    achieved_arithmetic: dict[ComputeClass, _Positive] = Field(default_factory=dict)
    achieved_bandwidth: dict[OpClass, _Positive] = Field(default_factory=dict)
    launch_s: Annotated[float, Field(ge=0)] | None = None
    dispatch_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_single(self) -> DeviceFile:
        if "float32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s has no float32, which every training needs")
        return self

    def spec(self) -> DeviceSpec:
        """Return the device; what the file does not say is as for the GPUs of the table."""
        like = DEVICES["v100"]
        given = self.model_dump(exclude={"schema_version", "clock"}, exclude_none=True)
        given["achieved_arithmetic"] = {**like.achieved_arithmetic, **self.achieved_arithmetic}
        given["achieved_bandwidth"] = {**like.achieved_bandwidth, **self.achieved_bandwidth}
        return replace(like, **given, reported=None).at_clock(self.clock)


def load_device(path: Path | str, dtype: DType) -> DeviceSpec:
    """Read a device from `path`.

    Raises:
        InputError: when the file cannot be used, or the device has no such arithmetic.
    """
    return supporting(load_record(DeviceFile, path, InputError, _REMEDY).spec(), dtype, f"'{path}'")
