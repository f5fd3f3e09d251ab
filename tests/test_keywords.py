"""A keyword that a function does not take: one sentence, with what could have been meant."""

from collections.abc import Callable
from typing import Any

import pytest

import planner
from planner.errors import InputError


@pytest.mark.parametrize(
    ("function", "keyword", "meant"),
    [
        (planner.profile, "estimate", "planner.estimate is a function of its own"),
        (
            planner.profile,
            "compile",
            "did you mean `compiled`, which the command line calls compile?",
        ),
        (planner.solve, "global_batch_size", "did you mean `minibatch`?"),
        (planner.profile, "batchsize", "did you mean batch_size?"),
        (planner.profile, "host", "it is an argument of planner.estimate"),
        (planner.train, "drop_last", "give `options=planner.TrainingOptions(drop_last=...)`"),
        (
            planner.train,
            "hang_timeout",
            "give `run_options=planner.RunOptions(hang_timeout_s=...)`",
        ),
        (planner.report, "run", "did you mean `measured`, which the command line calls run?"),
        (planner.flat_cluster, "memory", "did you mean memory_bytes?"),
        (planner.pipeline, "devices", "did you mean device?"),
    ],
)
def test_an_unknown_keyword_is_refused_with_what_was_meant(
    function: Callable[..., Any], keyword: str, meant: str
) -> None:
    with pytest.raises(InputError) as refused:
        function("model.py", None, **{keyword: True})

    assert refused.value.message == f"planner.{function.__name__} takes no argument `{keyword}`"
    assert meant in refused.value.hint
    assert f"help(planner.{function.__name__})" in refused.value.hint


def test_records_that_hints_name_are_public() -> None:
    assert planner.TrainingOptions(drop_last=True).drop_last
    assert planner.RunOptions(hang_timeout_s=5).hang_timeout_s == 5
