"""Pictures as pixels, where CairoSVG is installed."""

from __future__ import annotations

from planner.errors import InputError

SCALE = 2.0  # pixels per unit of the picture


def png(svg: str) -> bytes:
    """The picture, at twice its size.

    Raises:
        InputError: where CairoSVG, or the Cairo library that it needs, is not there.
    """
    try:
        import cairosvg
    except (ImportError, OSError) as cause:  # the latter when the library is missing
        why = str(cause).splitlines()[0]
        raise InputError(
            f"png needs CairoSVG and the Cairo library: {why}",
            hint="pip install 'pipeline-planner[report]' and apt-get install libcairo2, or take `format=svg`",
        ) from None
    made: bytes = cairosvg.svg2png(bytestring=svg.encode(), scale=SCALE)
    return made
