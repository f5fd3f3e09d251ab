"""A model in memory on its way to the workers: what of it other processes can have.

Workers are processes of their own. They get the objects that `planner.in_memory` was given by
pickle, which names functions and classes and copies values. So functions and classes have to be
where a worker can import them, and those that were typed into a notebook or a script are not.
"""

import io
import os
import pickle
from pathlib import Path
from types import FunctionType
from typing import Any

from planner.errors import InputError, first_line
from planner.model.spec import TrainingSpec
from planner.workers.handing import take_over
from planner.workers.job import Job
from planner.workers.secret import SECRET_VARIABLE

_HINT = (
    "write it into a file, as `%%writefile mine.py` does in a notebook, and import it from there; "
    "or train a whole model file: planner.train('model.py', plan)"
)


class _Pickler(pickle.Pickler):
    """Refuses what only this process knows, which pickle would name all the same."""

    def reducer_override(self, value: Any) -> Any:
        """Refuse functions and classes of this session; see `pickle.Pickler`."""
        if isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            raise InputError(
                f"{value.__qualname__} is defined in this session, and workers are processes of "
                f"their own, which cannot import it",
                hint=_HINT,
            )
        return NotImplemented


def packed_model(spec: TrainingSpec) -> bytes:
    """Return the objects of a model in memory for its workers.

    Raises:
        InputError: for functions, classes and objects that other processes cannot have.
    """
    content = io.BytesIO()
    try:
        _Pickler(content, pickle.HIGHEST_PROTOCOL).dump(dict(spec.objects or {}))
    except (pickle.PicklingError, AttributeError, TypeError) as cause:
        raise InputError(
            f"the model in memory cannot be handed to the workers, which are processes of their "
            f"own: {first_line(cause)}",
            hint=_HINT,
        ) from cause

    return content.getvalue()


def spec_of(job: Job) -> TrainingSpec:
    """Return what a worker trains: of the model file, or of the launching process's memory."""
    if not job.in_memory:
        return TrainingSpec.from_file(job.model)

    assert job.folder is not None
    # Of this process's own launcher, which has shown that it knows the secret of the run.
    content = take_over(Path(job.folder), os.environ[SECRET_VARIABLE].encode())
    return TrainingSpec.from_objects(**pickle.loads(content))
