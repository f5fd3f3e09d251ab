"""`planner.PipelineTrainer`, which needs transformers and accelerate."""

from typing import Any

from planner.errors import InputError

try:
    from planner.integrations.pipeline_trainer import PipelineTrainer
except ModuleNotFoundError as error:
    if error.name not in ("transformers", "accelerate"):
        raise
    _MISSING = error.name

    class PipelineTrainer:  # type: ignore[no-redef]
        """Stands here for those who only read: making one says what to install."""

        def __init__(self, *_: Any, **__: Any) -> None:
            """Raise InputError."""
            raise InputError(
                f"PipelineTrainer needs {_MISSING}, which is not installed",
                hint="in a clone of planner: pip install -c constraints.txt '.[hf]'",
            )


__all__ = ["PipelineTrainer"]
