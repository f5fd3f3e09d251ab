"""What GPUs reach in products of 8 bits, by the name of `gpus.json`: the table
`eight_bit_gpus.json`.

Peaks are dense ones of the makers' data sheets, with sums in single precision. "share" is what
products of 10^12 FLOPs and more reach of that, beside what tiles and their depth take
(`roofline.py`, whose limits of the depth are twice as large in 8 bits: a product that is computed
twice as fast is filled no faster). NVIDIA's are medians over the tables of aiconfigurator
(ai-dynamo/aiconfigurator 095f58a, Apache-2.0): TensorRT-LLM 1.3, one scale per tensor, as
Transformer Engine multiplies. In mxfp8, with a scale per 32 elements, the block-scaled products of
the same tables on the same units reach as much or more (B200 0.59 to 0.65, GB200 0.57 to 0.61, B300
0.64 to 0.80), so that the share serves for both. AMD's is that of products of three types, FP8
among them (Ambati et al. 2025, arXiv 2510.27583). "like" names the GPU that was measured in place
of this one.

Where a GPU multiplies operands of any layout, none is transposed: Ada and Hopper want both operands
of a product in 8 bits with their inner dimension together (cuBLAS, "FP8 data types usage"), so each
operand of a backward is there once more. mxfp8 is for Blackwell's data centre cards: Transformer
Engine 2 has no such products for the others.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from planner.formats.names import EightBits

EIGHT_BITS: tuple[EightBits, ...] = get_args(EightBits)
_TFLOPS = 1e12


@dataclass(frozen=True)
class EightBitRates:
    """Products of 8 bits of a GPU.

    Attributes:
        peak_flops_per_s: dense, by the data sheet.
        share: of the peak that long products reach.
        formats: that it has.
        any_layout: whether operands need not be transposed.
    """

    peak_flops_per_s: float
    share: float
    formats: tuple[EightBits, ...]
    any_layout: bool = False

    @property
    def achieved_flops_per_s(self) -> float:
        """What long products reach."""
        return self.share * self.peak_flops_per_s

    def at_clock(self, share: float) -> "EightBitRates":
        """Return the rates at a share of the boost clock."""
        peak = share * self.peak_flops_per_s
        return EightBitRates(peak, self.share, self.formats, any_layout=self.any_layout)


def _read() -> dict[str, EightBitRates]:
    table = json.loads(Path(__file__).with_name("eight_bit_gpus.json").read_text(encoding="utf-8"))
    return {
        name: EightBitRates(
            peak_flops_per_s=row["peak"] * _TFLOPS,
            share=row["share"],
            formats=tuple(row["formats"]),
            any_layout=row.get("any_layout", False),
        )
        for name, row in table.items()
    }


RATES: Mapping[str, EightBitRates] = _read()
