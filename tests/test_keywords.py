"""A keyword that a function does not take: one sentence, with what could have been meant."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import MISSING
from typing import Any

import pytest

import planner
import planner.options
import planner.options.verbs
from planner.errors import InputError
from planner.options.option import Options, choices_of, flag_of, options_in
from tests.samples import layer, profile


@pytest.mark.parametrize(
    ("function", "keyword", "meant"),
    [
        (planner.profile, "estimate", "planner.estimate is a function of its own"),
        (planner.solve, "global_batch_size", "did you mean `minibatch`?"),
        (planner.profile, "batchsize", "did you mean batch_size?"),
        (planner.profile, "host", "it is an argument of planner.estimate"),
        (planner.train, "max_steps", "did you mean `steps`?"),
        (
            planner.train,
            "hang_timeout",
            "did you mean `hang_timeout_s`, which the command line calls hang_timeout?",
        ),
        (planner.report, "measured", "did you mean `run`?"),
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


@pytest.mark.parametrize(
    "function",
    [
        planner.profile,
        planner.estimate,
        planner.solve,
        planner.fit,
        planner.train,
        planner.pipeline,
    ],
)
def test_python_calls_an_option_as_the_command_line_does(function: Callable[..., Any]) -> None:
    """But for units, which Python's names have and flags do not, and for where files go."""
    options = {
        each.name: option
        for record in _records()
        for each, option in options_in(record)
        if each.name in inspect.signature(function).parameters
    }
    assert options
    for name, option in options.items():
        flag = flag_of(name, option)
        if flag is not None and name != "place":
            assert flag.removeprefix("--").replace("-", "_") == name.removesuffix("_s")


def _records() -> list[type[Options]]:
    """Return all records of options."""
    for module in pkgutil.iter_modules(planner.options.__path__, "planner.options."):
        importlib.import_module(module.name)
    return list(_below(Options))


def _below(record: type[Options]) -> Iterator[type[Options]]:
    for each in record.__subclasses__():
        yield each
        yield from _below(each)


def _needed(record: type[Options]) -> dict[str, Any]:
    """Return a value for each option that has no default."""
    return {
        each.name: 1
        for each, _ in options_in(record)
        if each.default is MISSING and each.default_factory is MISSING
    }


def test_a_value_that_is_no_choice_is_refused_with_the_choices() -> None:
    refused = set()
    for record in _records():
        needed = _needed(record)
        for each, option in options_in(record):
            if choices_of(each.type) and option.parse is None:
                with pytest.raises(InputError, match=f"unknown `{each.name}=never so`") as error:
                    record(**needed | {each.name: "never so"})
                assert all(str(choice) in error.value.hint for choice in choices_of(each.type))
                refused.add(each.name)
    assert refused >= {"compress", "recompute", "solver", "granularity", "memory_format"}


def test_what_is_no_number_is_refused_where_an_option_wants_one() -> None:
    refused = set()
    for record in _records():
        needed = _needed(record)
        for each, option in options_in(record):
            bounded = option.least is not None or option.positive
            if not bounded or option.parse is not None:
                continue
            for value in ("two", [None], True):
                with pytest.raises(InputError, match=f"`{each.name}=") as error:
                    record(**needed | {each.name: value})
                assert error.value.hint
            refused.add(each.name)
    assert refused >= {"servers", "gpus_per_server", "steps", "max_stages"}


def test_one_number_is_a_list_of_it_where_there_may_be_several() -> None:
    number: Any = 4
    assert planner.options.verbs.ScheduleOptions(microbatches=number).microbatches == [4]
    with pytest.raises(InputError, match="too small"):
        planner.options.verbs.ScheduleOptions(microbatches=[4, 0])


def test_no_stages_are_no_plan() -> None:
    model = profile(layer("a", 1, 2), layer("b", 1, 2))
    with pytest.raises(InputError, match="`stages` is empty"):
        planner.price(model, planner.flat_cluster(2, 1e9), [])
