"""One option of the product: a field of a record, whose metadata make its flag, its keyword and its
documentation.
"""

import inspect
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from numbers import Real
from types import UnionType
from typing import (
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    overload,
)

from planner.arguments import checked_arguments
from planner.errors import InputError, did_you_mean
from planner.options.keywords import Keywords

WIDTH = 116  # columns of an entry under "Args:"
KeywordsT = ParamSpec("KeywordsT")
RecordT = TypeVar("RecordT")
RecordCoT = TypeVar("RecordCoT", covariant=True)
FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")
ThirdT = TypeVar("ThirdT")
AnswerT = TypeVar("AnswerT")
GivenT = TypeVar("GivenT", contravariant=True)
FirstInT = TypeVar("FirstInT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)
RecordInT = TypeVar("RecordInT", contravariant=True)


class OneOrNone(Protocol[GivenT, KeywordsT, ResultT]):
    """A function that takes one argument, which may be left out, and keywords."""

    def __call__(
        self,
        first: GivenT | None = None,
        /,
        *others: KeywordsT.args,
        **keywords: KeywordsT.kwargs,
    ) -> ResultT: ...


@dataclass(frozen=True)
class Option:
    """What is known of an option beside its name, type and default."""

    help: str  # what it does, without its default, in which other options stand in backticks
    metavar: str | None = None
    told: str = ""  # the default in words, where the value alone does not say it
    # of the command line, where it is not the name; None for what only Python users can give
    flag: str | None = ""
    unit: str = ""  # that the flag wants after a plain number
    negation: str = ""  # the flag that means False, for what is True by default
    least: int | None = None
    positive: bool = False
    # makes the value from a text, where its type does not say how
    parse: Callable[[str], Any] | None = None
    choices: Sequence[str] | None = None  # where its type does not say them
    repeat: bool = False  # whether the flag may be repeated, for a list of values
    const: str | None = None  # the value of a flag without text, where the text may be left out
    aliases: Sequence[str] = ()  # other names of the flag, which other programs have
    advanced: bool = False  # whether the help shows it only when asked for all


def option(default: Any, help: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field with this default and the metadata of an `Option`."""
    return field(default=default, metadata={"option": Option(help, metavar, **more)})


def same(record: type, name: str, default: Any = MISSING, **changes: Any) -> Any:
    """Return a field like that of another record, with another default or other metadata."""
    known: Field[Any] = record.__dataclass_fields__[name]  # type: ignore[attr-defined]
    default = known.default if default is MISSING else default
    return field(default=default, metadata={"option": replace(known.metadata["option"], **changes)})


class Options:
    """Base of the records of options: their help becomes part of the docstring, and their bounds
    are checked.
    """

    def __init_subclass__(cls) -> None:
        own = {
            name: each.metadata["option"]
            for name, each in vars(cls).items()
            if isinstance(each, Field) and "option" in each.metadata
        }
        cls.__doc__ = _documented(inspect.getdoc(cls) or "", "Attributes:", own)

    def __post_init__(self) -> None:
        """Parse texts; raise InputError for the first value that is out of its option's bounds."""
        for each, option in options_in(type(self)):
            value = getattr(self, each.name)
            if value == each.default:
                continue
            if isinstance(value, str) and option.parse is not None:
                value = _parsed(each.name, value, option)
                object.__setattr__(self, each.name, value)
            listed = _as_list(value, each.type)
            if listed is not value:
                value = listed
                object.__setattr__(self, each.name, value)
            _check_numbers(each.name, value, each.type, option)
            _check_choice(each.name, value, each.type)
            _check_bounds(each.name, value, option)


def part_of(options: Options, record: type[RecordT]) -> RecordT:
    """Return a record of options that another one contains."""
    own = {each.name: getattr(options, each.name) for each, _ in options_in(record)}
    return record(**own)


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Return the values that a type allows, where these are a Literal's; None may be one more."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check_choice(name: str, value: Any, kind: Any) -> None:
    choices = choices_of(kind)
    if not choices or value is None or value in choices:
        return
    known = [str(choice) for choice in choices]
    raise InputError(
        f"unknown `{name}={value}`",
        hint=f"{did_you_mean(str(value), known)}`{name}` is one of {', '.join(known)}",
    )


def _parsed(name: str, text: str, option: Option) -> Any:
    assert option.parse is not None
    try:
        return option.parse(text)
    except (ArgumentTypeError, ValueError) as error:
        raise InputError(f"`{name}`: {error}", hint=f"for example: {option.metavar}") from None


def _as_list(value: Any, kind: Any) -> Any:
    """Return one number as a list of it, where the type is of several."""
    if kind == Sequence[int] and isinstance(value, Real) and not isinstance(value, bool):
        return [value]
    return value


def _check_numbers(name: str, value: Any, kind: Any, option: Option) -> None:
    """Raise InputError for what is no number, or no list of numbers where the type is one."""
    numbers = [value]
    if kind == Sequence[int]:
        if isinstance(value, str) or not isinstance(value, Iterable):
            hint = f"give a list of numbers: `{name}=[2, 4]`"
            raise InputError(f"`{name}={value!r}` is no list of numbers", hint=hint)
        numbers = list(value)
    elif option.least is None and not option.positive:
        return

    for number in numbers:
        if not isinstance(number, Real) or isinstance(number, bool):
            raise InputError(f"`{name}={value!r}` is no number", hint=f"give `{name}` a number")


def _check_bounds(name: str, value: Any, option: Option) -> None:
    numbers = value if isinstance(value, list | tuple) else [value]
    if option.least is not None and any(number < option.least for number in numbers):
        hint = f"give `{name}` {option.least} or more"
        raise InputError(f"`{name}={value}` is too small", hint=hint)
    if option.positive and not 0 < value < float("inf"):
        raise InputError(f"`{name}={value}` is not above 0", hint=f"give a larger `{name}`")


def options_in(record: type) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a record that are options."""
    for each in fields(record):
        if "option" in each.metadata:
            yield each, each.metadata["option"]


def given(options: Any, name: str) -> bool:
    """Return whether an argument was given, in a record or on a command line."""
    return getattr(options, name) not in (None, False, ())


def refuse(options: Any, chosen: str, *others: str, why: str = "") -> None:
    """Raise InputError for the first of the other arguments that was given, because the chosen one
    contradicts it.
    """
    for name in filter(lambda each: given(options, each), others):
        hint = f"leave out one of `{chosen}` and `{name}`"
        raise InputError(f"`{name}` cannot be combined with `{chosen}`{why}", hint=hint)


def flag_of(name: str, option: Option) -> str | None:
    """Return the flag of an option; None where it has none."""
    if option.flag == "":
        return f"--{name.replace('_', '-')}"
    return option.flag


class OptionalFirst(Protocol[GivenT, RecordInT, ResultT]):
    """A function of an argument and a record, which may both be left out."""

    def __call__(self, first: GivenT | None = None, record: RecordInT = ..., /) -> ResultT: ...


class OptionalSecond(Protocol[FirstInT, GivenT, RecordInT, ResultT]):
    """A function of two arguments and a record, of which the first alone must be given."""

    def __call__(
        self, first: FirstInT, second: GivenT | None = None, record: RecordInT = ..., /
    ) -> ResultT: ...


class TwoOrOne(Protocol[FirstInT, GivenT, KeywordsT, ResultT]):
    """A function that takes two arguments, of which the second may be left out, and keywords."""

    def __call__(
        self,
        first: FirstInT,
        second: GivenT | None = None,
        /,
        *others: KeywordsT.args,
        **keywords: KeywordsT.kwargs,
    ) -> ResultT: ...


class Decorator(Protocol[KeywordsT, RecordCoT]):
    """Decorates a function whose last parameter is a record: see `keywords_of`.

    The overloads are the numbers of parameters before the record. A type checker cannot be told
    "any number of them", because a signature has one `ParamSpec`, and that is the record's.
    """

    @overload
    def __call__(
        self, function: OptionalFirst[FirstT, RecordCoT, AnswerT], /
    ) -> OneOrNone[FirstT, KeywordsT, AnswerT]: ...
    @overload
    def __call__(
        self, function: Callable[[RecordCoT], AnswerT], /
    ) -> Callable[KeywordsT, AnswerT]: ...
    @overload
    def __call__(
        self, function: OptionalSecond[FirstT, SecondT, RecordCoT, AnswerT], /
    ) -> TwoOrOne[FirstT, SecondT, KeywordsT, AnswerT]: ...
    @overload
    def __call__(
        self, function: Callable[[FirstT, RecordCoT], AnswerT], /
    ) -> Callable[Concatenate[FirstT, KeywordsT], AnswerT]: ...
    @overload
    def __call__(
        self, function: Callable[[FirstT, SecondT, RecordCoT], AnswerT], /
    ) -> Callable[Concatenate[FirstT, SecondT, KeywordsT], AnswerT]: ...
    @overload
    def __call__(
        self, function: Callable[[FirstT, SecondT, ThirdT, RecordCoT], AnswerT], /
    ) -> Callable[Concatenate[FirstT, SecondT, ThirdT, KeywordsT], AnswerT]: ...


def keywords_of(record: Callable[KeywordsT, RecordT]) -> Decorator[KeywordsT, RecordT]:
    """Decorate a function whose last parameter is a record: callers give the record's fields as
    keywords.

    A type checker sees the keywords with their types. The docstring gets a line for each of them
    under "Args:".
    """

    made: Any = record  # of which the fields are asked below

    def decorate(function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        check = checked_arguments(function)
        keywords = Keywords(function.__name__, (each.name for each in first), made)

        def called(*arguments: Any, **given: Any) -> Any:
            keywords.check(given)
            own = {each.name: given.pop(each.name) for each in first if each.name in given}
            check(arguments, own)
            try:
                return function(*arguments, **own, **{last.name: made(**given)})
            except ValueError as cause:
                # not at the top: it imports pydantic
                from planner.formats.files import out_of_range

                sentence = out_of_range(cause)
                if sentence is None:
                    raise
                raise sentence from cause

        for name in ("__module__", "__name__", "__qualname__"):
            setattr(called, name, getattr(function, name))
        options = {each.name: option for each, option in options_in(made)}
        called.__doc__ = _documented(inspect.getdoc(function) or "", "Args:", options)
        parameters = [*first, *_keyword_parameters(made)]
        described = signature.replace(parameters=parameters)
        called.__signature__ = described  # type: ignore[attr-defined]
        return called

    return decorate


def _keyword_parameters(record: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return a record's fields as the parameters that a function shows for them."""
    return [
        each.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=inspect.formatannotation(each.annotation),
        )
        for each in inspect.signature(record).parameters.values()
    ]


def _documented(text: str, section: str, own: Mapping[str, Option]) -> str:
    """Add options to a section of a docstring, which follows the first paragraph where there is
    none.
    """
    filled = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent=" " * 8).fill
    entries = "\n".join(
        filled(f"{name}: {'; '.join(each.help.splitlines())}.") for name, each in own.items()
    )
    if f"\n{section}\n" in text:
        before, _, after = text.partition(f"{section}\n")
        described, blank, rest = after.partition("\n\n")
        return f"{before}{section}\n{described}\n{entries}{blank}{rest}"
    summary, blank, rest = text.partition("\n\n")
    return f"{summary}\n\n{section}\n{entries}{blank}{rest}"
