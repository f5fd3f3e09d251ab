"""Rows of records whose fields are arrays."""

from collections.abc import Mapping
from dataclasses import fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.cost.work import Integers, Record
from planner.formats.files import replace


def taken(
    record: Record, rows: Integers | NDArray[np.bool_] | slice | tuple[Integers, ...]
) -> Record:
    """Return some rows of work or footprints, or entries of matrices; what has none is the same for
    all.
    """
    columns = {}
    for field in fields(record):
        column = np.asarray(getattr(record, field.name))
        columns[field.name] = column[rows] if column.ndim else column
    return type(record)(**columns)


def with_columns(
    record: Record, rows: NDArray[np.bool_], columns: Mapping[str, ArrayLike]
) -> Record:
    """Return the record with other values in some rows of the named columns."""
    changed = {}
    for name, values in columns.items():
        column = np.broadcast_to(getattr(record, name), rows.shape).copy()
        column[rows] = values
        changed[name] = column
    return replace(record, **changed)


def numbered(counts: Integers) -> tuple[Integers, Integers]:
    """Return a row for each member of groups of so many: its group, and its number in the group
    from 0.
    """
    group = np.repeat(np.arange(len(counts)), counts)
    begin = np.cumsum(counts) - counts
    return group, np.arange(len(group)) - begin[group]
