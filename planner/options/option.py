"""One option of the product: a field of a record, whose metadata make its flag, its keyword and its
documentation.
"""

import inspect
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, overload

from planner.arguments import checked_arguments
from planner.errors import InputError
from planner.formats.files import replace
from planner.options.keywords import Keywords

WIDTH = 116  # columns of an entry under "Args:"
KeywordsT = ParamSpec("KeywordsT")
RecordT = TypeVar("RecordT")
FirstT = TypeVar("FirstT")
SecondT = TypeVar("SecondT")
ThirdT = TypeVar("ThirdT")
AnswerT = TypeVar("AnswerT")
GivenT = TypeVar("GivenT", contravariant=True)
ResultT = TypeVar("ResultT", covariant=True)


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
        declared = {name: each for name, each in vars(cls).items() if isinstance(each, Field)}
        own = {
            name: each.metadata["option"]
            for name, each in declared.items()
            if "option" in each.metadata
        }
        cls.__doc__ = _documented(inspect.getdoc(cls) or "", "Attributes:", own)

    def __post_init__(self) -> None:
        """Parse texts; raise InputError for the first value that is out of its option's bounds."""
        for each, option in options_in(type(self)):
            name, value = each.name, getattr(self, each.name)
            if value == each.default:
                continue
            if isinstance(value, str) and option.parse is not None:
                try:
                    object.__setattr__(self, name, value := option.parse(value))
                except (ArgumentTypeError, ValueError) as error:
                    raise InputError(
                        f"`{name}`: {error}", hint=f"for example: {option.metavar}"
                    ) from None
            if option.least is not None and value < option.least:
                raise InputError(
                    f"`{name}={value}` is too small", hint=f"give `{name}` {option.least} or more"
                )
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
        raise InputError(f"`{name}` has no meaning with `{chosen}`{why}", hint=hint)


def flag_of(name: str, option: Option) -> str | None:
    """Return the flag of an option; None where it has none."""
    return option.flag if option.flag is None else option.flag or f"--{name.replace('_', '-')}"


@overload
def keywords_of(
    record: Callable[KeywordsT, RecordT],
) -> Callable[
    [Callable[[FirstT, SecondT, RecordT], AnswerT]],
    Callable[Concatenate[FirstT, SecondT, KeywordsT], AnswerT],
]: ...
@overload
def keywords_of(
    record: Callable[KeywordsT, RecordT], *, arguments: Literal[1]
) -> Callable[
    [Callable[[FirstT, RecordT], AnswerT]], Callable[Concatenate[FirstT, KeywordsT], AnswerT]
]: ...
@overload
def keywords_of(
    record: Callable[KeywordsT, RecordT], *, arguments: Literal["one or none"]
) -> Callable[
    [Callable[[FirstT | None, RecordT], AnswerT]], OneOrNone[FirstT, KeywordsT, AnswerT]
]: ...
@overload
def keywords_of(
    record: Callable[KeywordsT, RecordT], *, arguments: Literal[0]
) -> Callable[[Callable[[RecordT], AnswerT]], Callable[KeywordsT, AnswerT]]: ...
@overload
def keywords_of(
    record: Callable[KeywordsT, RecordT], *, arguments: Literal[3]
) -> Callable[
    [Callable[[FirstT, SecondT, ThirdT, RecordT], AnswerT]],
    Callable[Concatenate[FirstT, SecondT, ThirdT, KeywordsT], AnswerT],
]: ...
def keywords_of(record: Any, **_: Any) -> Any:
    """Decorate a function whose last parameter is a record: callers give the record's fields as
    keywords.

    A type checker sees the keywords with their types. The docstring gets a line for each of them
    under "Args:".
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        *first, last = signature.parameters.values()
        check = checked_arguments(function)
        known = Keywords(function.__name__, (each.name for each in first), record)

        def called(*arguments: Any, **keywords: Any) -> Any:
            known.check(keywords)
            own = {each.name: keywords.pop(each.name) for each in first if each.name in keywords}
            check(arguments, own)
            try:
                return function(*arguments, **own, **{last.name: record(**keywords)})
            except ValueError as cause:
                # not at the top: it imports pydantic
                from planner.formats.files import out_of_range

                sentence = out_of_range(cause)
                if sentence is None:
                    raise
                raise sentence from cause

        parameters = first + [
            each.replace(
                kind=inspect.Parameter.KEYWORD_ONLY,
                annotation=inspect.formatannotation(each.annotation),
            )
            for each in inspect.signature(record).parameters.values()
        ]
        for name in ("__module__", "__name__", "__qualname__"):
            setattr(called, name, getattr(function, name))
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        own = {each.name: option for each, option in options_in(record)}
        called.__doc__ = _documented(inspect.getdoc(function) or "", "Args:", own)
        return called

    return decorate


def _documented(text: str, section: str, own: Mapping[str, Option]) -> str:
    """Add options to a section of a docstring, which follows the first paragraph where there is
    none.
    """
    filled = textwrap.TextWrapper(WIDTH, initial_indent="    ", subsequent_indent=" " * 8).fill
    entries = "\n".join(filled(f"{name}: {each.help}.") for name, each in own.items())
    if f"\n{section}\n" in text:
        before, _, after = text.partition(f"{section}\n")
        described, blank, rest = after.partition("\n\n")
        return f"{before}{section}\n{described}\n{entries}{blank}{rest}"
    summary, blank, rest = text.partition("\n\n")
    return f"{summary}\n\n{section}\n{entries}{blank}{rest}"
