"""Rules that no linter knows: who knows a flag, and who a schedule by its name."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from planner.cli.output import as_flags
from planner.schedule.registry import NAMES

PACKAGE = Path(__file__).parents[1] / "planner"
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_OTHER_PROGRAMS = re.compile(r"torchrun|--(nnodes|nproc-per-node|node-rank|rdzv-\w+|master-\w+)")
# Packages that write command lines of other systems, or scripts with options of their own.
_EXPORTS = ("exports/megatron.py", "exports/transformers.py")


def test_records_and_dataclasses_are_replaced_by_one_function() -> None:
    """mypy takes `planner.formats.files.replace` for that of dataclasses, which raises TypeError on
    a record of pydantic.
    """
    # These know no records, and the command line must not import pydantic to start.
    below = {
        "formats/files.py",
        "options/option.py",
        "options/solving.py",
        "profiler/estimated/devices.py",
        "schedule/derived.py",
        "schedule/schedule.py",
    }
    found = {
        place
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(
            r"^from dataclasses import .*\breplace\b|\bdataclasses\.replace\(",
            path.read_text("utf-8"),
            re.MULTILINE,
        )
        for place in (path.relative_to(PACKAGE).as_posix(),)
    }
    assert found == below


def test_no_line_is_wider_than_a_page() -> None:
    """ruff's E501 does not count a comment for a checker, `# type: ignore`, at a line's end."""
    root = PACKAGE.parent
    wide = [
        f"{path.relative_to(root)}:{number}"
        for folder in ("planner", "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if len(line) > 100
    ]
    assert not wide


def test_only_the_command_line_knows_flags() -> None:
    """Messages of the library name arguments, `steps=0`; `planner.cli.output` shows them as
    flags.
    """
    assert not list(_lines_with_flags())


def test_every_argument_in_a_message_has_a_flag() -> None:
    """A misspelt `argument` would reach the user of the command line with its backticks."""
    assert not [
        text
        for text in _texts()
        for name in re.findall(r"`[a-z_]+`", text)
        if as_flags(name) == name
    ]


def test_nothing_outside_schedule_knows_a_schedule_by_its_name() -> None:
    """Schedules are asked for their traits; a comparison with a name would have to be found for
    every new schedule.
    """
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value!r}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.is_relative_to(PACKAGE / "schedule")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in NAMES
    ]
    assert not found


def test_nobody_asks_a_sharding_level_for_its_number() -> None:
    """What replicas divide is asked in words, `stage.shards_gradients`; `planner.stages.sharding`
    knows the numbers.

    Records that hold the number say so in one word, `level`, which nobody else reads.
    """
    records = (
        "stages/sharding.py",
        "cost/candidate.py",
        "formats/plan_parts.py",
        "formats/own_plan.py",
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in records
        for node in _attributes(ast.parse(path.read_text(encoding="utf-8")))
        if node.attr in ("level", "sharding_level")
    ]
    assert not found


def test_nobody_asks_a_stage_for_its_tensor_degree() -> None:
    """What ranks divide is asked in words, `stage.divides_layers`; `planner.stages.tensor` knows
    the number.

    Options of solving and profiles have a `tensor`, too: degrees to try, and costs at each of them.
    """
    records = (
        "stages/tensor.py",
        "formats/plan_parts.py",
        "formats/own_plan.py",
        "cost/candidate.py",
    )
    asked = r"\b(stage|own|peer|each|stages\[[^]]*\])(\.options)?\.tensor\b"
    of_a_stage = re.compile(rf"{asked}|plan\.degrees\[|\(plan\.degrees\)")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in records
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if of_a_stage.search(line)
    ]
    assert not found


def test_no_sharding_level_is_compared_with_a_number() -> None:
    """Not even where a record holds it: `level > 1` would have to be found for every new level."""
    numbers = re.compile(
        r"level\b\s*([<>]=?|[!=]=)\s*\d|\d\s*([<>]=?|[!=]=)\s*\w*\.?(sharding_)?level\b"
    )
    of_links = ("simulator/communication.py",)  # the levels of a cluster
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in of_links
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if numbers.search(line)
    ]
    assert not found


def test_one_module_knows_what_a_kind_of_device_does() -> None:
    """What differs between kinds of device is asked of `planner.runtime`, which alone uses
    PyTorch's modules for them.

    `fake.py` lets a machine without CUDA believe in it, for the dtypes of autocast, and so replaces
    CUDA's own functions.
    """
    elsewhere = re.compile(
        r"torch\.(cuda|xpu|mtia|accelerator)\b|get_device_module|is_cuda|record_stream|\bpin_memory"
    )
    allowed = ("runtime.py", "model/capture/fake.py")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in allowed
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1)
        if elsewhere.search(line)
    ]
    assert not found


def test_kinds_that_say_cuda_are_about_cuda() -> None:
    """Code that asks whether a device is of CUDA is wrong for other GPUs, unless it is about CUDA's
    own rules.
    """
    allowed = (
        "runtime.py",  # knows all kinds
        "formats/names.py",  # lists them
        "profiler/estimated/",  # of published devices
        "model/capture/fake.py",  # pretends to have one
        "workers/numerics.py",  # TF32
        "workers/place.py",  # the kind of a seat that says nothing else
    )
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.relative_to(PACKAGE).as_posix().startswith(allowed)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == "cuda"
    ]
    assert not found


def test_tuned_numbers_are_fields_of_one_record() -> None:
    """How far searches look is read from the question, in `planner.solver.tuning`, where each
    number has its reason.
    """
    exact = {
        "analysis/explain.py": {"_SAME"},  # rounding
        "analysis/fewer.py": {"_COPIES"},  # what a host of an elastic run holds
        "solver/assemble.py": {"GIVEN"},  # the report on a plan that nobody searched for
        "solver/problem/downsets.py": {"_TICKS", "_WORD"},  # exact sums; bits of a word
        "solver/problem/infeasible.py": {"PLENTY"},  # memory without an end
        "solver/problem/result.py": {"RESOLUTION"},  # rounding
        "solver/search/chain/fitting.py": {"_BITS"},  # of a key
        "solver/search/chain/search.py": {"ANY_TIME_S"},  # time without an end
        "solver/search/chain/fewest.py": {"MISSED", "PLAIN", "RECOMPUTING"},  # answers
        "solver/search/integer/cbc.py": {"_FEASIBILITY", "_PR_SET_PDEATHSIG"},  # rounding; Linux
        "solver/search/integer/ilp_flow.py": {"SCALE"},  # the unit of time in a program
        "solver/search/levels/stage_bounds.py": {"ACTIVATIONS", "GRADIENTS", "MESSAGES"},  # rows
        "solver/sizes/minibatch.py": {
            "FINE_TUNED_SAMPLES",
            "MINIBATCH_TOKENS",
            "MOST_TRAINED_SHARE",
        },  # a published table
    }
    found = dict[str, set[str]]()
    for path in _modules("analysis", "solver"):
        names = set(_names_of_numbers(ast.parse(path.read_text("utf-8"))))
        if names:
            found[path.relative_to(PACKAGE).as_posix()] = names
    assert found == exact


def test_the_standard_record_is_a_default_and_nothing_else() -> None:
    """Code that reads it would not read the record of its question."""
    found = list[str]()
    for path in _modules("analysis", "solver"):
        tree = ast.parse(path.read_text("utf-8"))
        defaults = {id(inner) for outer in _defaults(tree) for inner in ast.walk(outer)}
        found += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and node.id == "STANDARD" and id(node) not in defaults
        ]
    assert not found


def _modules(*packages: str) -> Iterator[Path]:
    """The modules of some packages, but for the record itself."""
    for package in packages:
        for path in sorted((PACKAGE / package).rglob("*.py")):
            if not path.is_relative_to(PACKAGE / "solver" / "tuning"):
                yield path


def _names_of_numbers(tree: ast.Module) -> Iterator[str]:
    """The constants of a module, or of its classes, whose values have numbers in them."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for statement in itertools.chain.from_iterable(bodies):
        match statement:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case _:
                continue
        if any(
            isinstance(node, ast.Constant) and type(node.value) in (int, float)
            for node in ast.walk(value)
        ):
            names = (
                node.id
                for target in targets
                for node in ast.walk(target)
                if isinstance(node, ast.Name)
            )
            yield from (name for name in names if name.isupper())


def _defaults(tree: ast.Module) -> Iterator[ast.expr]:
    """The defaults of all parameters, and of all fields of classes."""
    for node in ast.walk(tree):
        match node:
            case ast.arguments():
                yield from (
                    *node.defaults,
                    *(each for each in node.kw_defaults if each is not None),
                )
            case ast.ClassDef():
                fields = (each.value for each in node.body if isinstance(each, ast.AnnAssign))
                yield from (value for value in fields if value is not None)


def _attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """All attributes that are read, and not called."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in called:
            yield node


def _texts() -> Iterator[str]:
    """All strings of the library but docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "exports"):
            continue
        tree = ast.parse(path.read_text("utf-8"))
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                yield node.value


def _lines_with_flags() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith("cli/") or place in _EXPORTS:
            continue
        for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            declared = place.startswith("options/") and re.search(
                r'\b((flag|negation)="|aliases=\(")--', line
            )
            if _FLAG.search(line) and not _OTHER_PROGRAMS.search(line) and not declared:
                yield f"{place}:{number}: {line.strip()}"
