"""Turn SVG pictures into PNG, with CairoSVG."""

from __future__ import annotations

from planner.errors import InputError, first_line

SCALE = 2.0  # pixels per unit of the picture


def png(svg: str) -> bytes:
    """Draw the picture at twice its size.

    Raises:
        InputError: if CairoSVG, or the Cairo library that it needs, is not installed.
    """
    try:
        import cairosvg
    except (ImportError, OSError) as cause:  # OSError: the Cairo library is missing
        raise InputError(
            f"png needs CairoSVG and the Cairo library: {first_line(cause)}",
            hint="pip install 'pipeline-planner[report]' and apt-get install libcairo2, or take `format=svg`",
        ) from None
    made: bytes = cairosvg.svg2png(bytestring=svg.encode(), scale=SCALE)
    return made
