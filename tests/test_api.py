"""The verbs are functions with the command line's defaults, and answers show themselves."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import pydoc
import re
import subprocess
import sys
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import planner
from planner.cli.main import build_parser
from planner.cli.solve import complaints
from planner.errors import ClusterError, InputError, PlanError, ProfileError, UnitError
from planner.formats.profile import Device
from planner.options.option import flag_of, options_in
from tests.cli.in_process import plan as plan_verb
from tests.docs import small_model

ROOT = Path(__file__).parents[1]
VGG = ROOT / "profiles" / "vgg16" / "cpu.json"
VERBS = (
    "profile",
    "solve",
    "fit",
    "price",
    "show",
    "compare",
    "explain",
    "simulate",
    "report",
    "train",
)
OTHERS = ("export", "quickstart", "selftest")


@pytest.fixture(scope="module")
def profile() -> planner.Profile:
    return planner.load_profile(str(VGG))


@pytest.fixture(scope="module")
def solved(profile: planner.Profile) -> planner.Plan:
    return planner.solve(profile, planner.flat_cluster(4, "1Gbps"))


def _verb(name: str) -> argparse.ArgumentParser:
    verbs = next(
        each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction)
    )
    parser: argparse.ArgumentParser = verbs.choices[name]
    return parser


@pytest.mark.parametrize("name", [*VERBS, *OTHERS])
def test_every_verb_is_a_function(name: str) -> None:
    assert inspect.isfunction(getattr(planner, name.replace("-", "_")))


@pytest.mark.parametrize("name", VERBS + OTHERS)
def test_no_default_of_the_command_line_differs_from_the_keywords(name: str) -> None:
    """A flag that is not given is None, so that the keyword's default holds; any other default has
    to equal it.
    """
    keywords = inspect.signature(getattr(planner, name.replace("-", "_"))).parameters
    for action in _verb(name)._actions:
        keyword = keywords.get(action.dest)
        if (
            keyword is None
            or keyword.default is keyword.empty
            or action.default in (None, argparse.SUPPRESS)
        ):
            continue  # a function is given what the command line reads from a file
        assert action.default == keyword.default, action.dest


def _records() -> list[tuple[str, type]]:
    from planner.options.solving import SolveOptions
    from planner.options.verbs import FitOptions, QuickstartOptions, ReportOptions, SelftestOptions

    return [
        ("solve", SolveOptions),
        ("fit", FitOptions),
        ("report", ReportOptions),
        ("quickstart", QuickstartOptions),
        ("selftest", SelftestOptions),
    ]


@pytest.mark.parametrize(("name", "record"), _records())
def test_keywords_and_flags_are_of_one_record(name: str, record: type) -> None:
    keywords, flags = (
        inspect.signature(getattr(planner, name)).parameters,
        _verb(name)._option_string_actions,
    )
    for each, option in options_in(record):
        assert keywords[each.name].default == each.default or each.default is MISSING
        flag = flag_of(each.name, option)
        assert flag is None or flag in flags or (name, record.__name__) == ("fit", "FitOptions")


def test_a_schedule_that_divides_has_as_many_microbatches_from_python(
    profile: planner.Profile, tmp_path: Path
) -> None:
    ours = planner.solve(profile, planner.flat_cluster(4, "1Gbps"), schedule="1f1b-flush")
    arguments = ("--gpus", "4", "--bandwidth", "1Gbps", "--schedule", "1f1b-flush", "--json")
    theirs = json.loads(plan_verb("solve", "--profile", str(VGG), *arguments, cwd=tmp_path).stdout)
    assert ours.microbatches == theirs["microbatches"] == 16
    assert ours.predicted.samples_per_s == theirs["predicted"]["samples_per_s"]
    assert len(ours.baselines) == len(theirs["baselines"])


def test_every_type_of_a_parameter_is_public() -> None:
    known = {
        "Any",
        "Callable",
        "Iterable",
        "Mapping",
        "Sequence",
        "Path",
        "None",
        "Literal",
        "TypeAlias",
    }
    known |= {
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "tuple",
        "dict",
        "list",
        "object",
        "TypeVar",
        "Iterator",
    }
    known |= {
        "nn",
        "Module",
        "Optimizer",
        "LRScheduler",
        "Tensor",
        "AbstractContextManager",
        "Batch",
        "collections",
    }
    known |= {
        "Optional",
        "Backend",
        "DeviceType",
        "System",
        "LossFunction",
        "Quantity",
        "Stages",
        "ClusterAt",
    }  # texts and functions
    known |= {"abc", "pathlib", "typing", "planner", "torch", "builtins"}
    missing = set()
    for name in planner.__all__:
        for parameter in inspect.signature(getattr(planner, name)).parameters.values():
            text = re.sub(r"Literal\[[^]]*\]|'[^']*'", "", str(parameter.annotation))
            for word in re.findall(r"(?<![\w.])(?:[a-z_]+\.)*([A-Z]\w*)", text):
                if word not in known and not hasattr(planner, word):
                    missing.add(f"{name}({parameter.name}): {word}")
    assert not sorted(missing)


@pytest.mark.parametrize(
    ("bandwidth", "error", "sentence"),
    [
        ("1", UnitError, "bandwidth '1' is not a rate"),
        ("nvlink9", UnitError, "'nvlink9' is no link that is known by name"),
        (-1.0, ClusterError, "there is no such cluster: levels"),
    ],
)
def test_quantities_have_units(bandwidth: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)):
        planner.flat_cluster(4, bandwidth)
    assert planner.flat_cluster(4, "10Gbps", "16GB", "2s") == planner.flat_cluster(
        4, 1.25e9, 16 * 10**9, 2.0
    )
    two = planner.hierarchical_cluster((4, 2), ("1GB/s", "8Gbps"), "1GiB", ("1us", 0.0))
    assert [level.bandwidth_bytes_per_s for level in two.levels] == [1e9, 1e9]


@pytest.mark.parametrize(
    ("verb", "given", "sentence"),
    [
        ("solve", ("a profile", "a plan"), "`cluster` of solve takes Cluster, not Plan"),
        (
            "solve",
            ("profile.json", "a plan"),
            "`profile` of solve takes Profile, not str",
        ),
        (
            "explain",
            ("a plan", "a profile"),
            "`profile` of explain takes Profile, not Plan",
        ),
        (
            "compare",
            ("a plan", "a profile"),
            "`profile` of compare takes Profile, not Plan",
        ),
        ("simulate", ("a profile",), "`plan` of simulate takes Plan, not Profile"),
        ("train", ("model.py", "a profile"), "`plan` of train takes Plan, not Profile"),
        ("flat_cluster", ("10Gbps", 2), "`gpus` of flat_cluster takes int, not str"),
        ("fit", ("llama-7b", "two"), "`gpus` of fit takes int, not str"),
    ],
)
def test_what_is_given_in_the_wrong_place(
    profile: planner.Profile, solved: planner.Plan, verb: str, given: tuple[Any, ...], sentence: str
) -> None:
    values = {"a profile": profile, "a plan": solved}
    with pytest.raises(planner.InputError, match=sentence):
        getattr(planner, verb)(*(values.get(each, each) for each in given))


def test_numbers_of_numpy_are_numbers() -> None:
    assert planner.flat_cluster(np.int64(4), "1Gbps").gpus == 4


def test_options_take_texts_as_their_flags_do(profile: planner.Profile) -> None:
    options = planner.SolveOptions(
        time_limit_s="250ms",  # type: ignore[arg-type]
        tensor="1,2",  # type: ignore[arg-type]
    )
    assert options.time_limit_s == 0.25
    with pytest.raises(InputError, match="time '5' has no unit"):
        planner.SolveOptions(time_limit_s="5")  # type: ignore[arg-type]
    described = planner.cluster(
        profile, topology="2x2", bandwidth=["nvlink2", 1.25e9], memory="4GB", own_links=True
    )
    assert described == planner.hierarchical_cluster(
        (2, 2), ("nvlink2", "10Gbps"), "4GB", shared=False
    )
    with pytest.raises(ClusterError, match="no bandwidth"):
        planner.cluster(profile, gpus=2)


def test_plans_leave_a_margin_of_a_profiled_gpu(profile: planner.Profile) -> None:
    """As `plan fit` does; a limit that is given is taken as it is, and a CPU has none."""
    device = Device(kind="cuda", name="some GPU", memory_bytes=80 * 2**30)
    on_gpu = profile.model_copy(update={"device": device})
    assert planner.cluster(on_gpu, gpus=2, bandwidth="1Gbps").memory_bytes == 76 * 2**30
    assert (
        planner.cluster(on_gpu, gpus=2, bandwidth="1Gbps", memory="80GiB").memory_bytes
        == 80 * 2**30
    )
    assert planner.cluster(profile, gpus=2, bandwidth="1Gbps").memory_bytes is None
    plan = planner.solve(on_gpu, planner.cluster(on_gpu, gpus=2, bandwidth="1Gbps"))
    said = [text for _, text, _ in complaints(plan, on_gpu) if text.startswith("plans fill")]
    assert said == [
        "plans fill 95% of the 80 GiB that the profiled GPU has, for fragments and what libraries "
        "take"
    ]
    given = planner.solve(
        on_gpu, planner.cluster(on_gpu, gpus=2, bandwidth="1Gbps", memory="80GiB")
    )
    assert not any(text.startswith("plans fill") for _, text, _ in complaints(given, on_gpu))


def test_price_takes_plain_numbers(profile: planner.Profile) -> None:
    four = planner.flat_cluster(4, "1Gbps")
    assert planner.price(profile, four, 4).config == "1-1-1-1"
    assert planner.price(profile, four, [20, 3], replicas=[3, 1]).config == "3-1"
    assert (
        planner.price(profile, four, ["features.30"], replicas=2, shard_optimizer=True)
        .stages[1]
        .sharded
    )
    again = planner.price(
        profile, four, 2, recompute={0: 2}, replicas="1", schedule="1f1b-flush", microbatches=8
    )
    assert again.microbatches == 8
    assert len(again.stages[0].recompute_groups) == 2
    with pytest.raises(InputError, match="`stages=3,0` has a stage without blocks"):
        planner.price(profile, four, [3, 0])


def test_a_model_in_memory_has_what_a_file_has() -> None:
    data = [((torch.randn(4),), torch.tensor(1))] * 8
    spec = planner.in_memory(
        nn.Linear(4, 2),
        example_batch=((torch.randn(2, 4),), torch.tensor([0, 1])),
        loss=nn.functional.cross_entropy,
        dataset=data,
        evaluation_dataset=data[:2],
        metrics=lambda output, target: {"accuracy": (output.argmax(1) == target).float().mean()},
        blocks=lambda model: [model],
        tensor_parallel_plan={"": "colwise"},
        loss_weight=len,
    )
    dataset = spec.dataset()
    assert dataset is not None
    assert len(dataset) == 8  # type: ignore[arg-type]
    assert spec.tensor_parallel_plan() == {"": "colwise"}
    assert spec.metrics(torch.eye(2), torch.tensor([0, 1])) == {"accuracy": 1.0}
    assert spec.loss_weight([1, 2, 3]) == 3


def test_print_is_the_table_and_a_notebook_shows_the_report(
    solved: planner.Plan, profile: planner.Profile
) -> None:
    assert "stage    layers" in str(solved)
    page = solved._repr_html_()
    assert page is not None
    assert "iframe" in page
    assert "Bottleneck" in page
    compared = planner.compare(profile, solved)
    assert "data parallel" in str(compared)
    assert "<table" in (compared._repr_html_() or "")
    assert "limited by" in (planner.explain(profile, solved)._repr_html_() or "")
    assert planner.show(solved) == str(solved)
    assert "busiest" in str(planner.simulate(solved))


def test_a_profile_that_is_not_there_is_made_by_profiling(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no file") as missing:
        planner.show(str(tmp_path / "profile.json"))
    assert "plan profile" in missing.value.hint
    with pytest.raises(PlanError, match="no file"):
        planner.show(str(tmp_path / "other.json"))


def test_records_write_themselves(
    solved: planner.Plan, profile: planner.Profile, tmp_path: Path
) -> None:
    solved.save(tmp_path / "plan.json")
    profile.save(tmp_path / "profile.json")
    assert planner.load_plan(tmp_path / "plan.json") == solved
    assert planner.load_profile(str(tmp_path / "profile.json")).digest == profile.digest


def test_help_begins_with_the_functions() -> None:
    lines = pydoc.plain(pydoc.render_doc(planner)).splitlines()
    assert any("compare, explain" in line for line in lines[:25])
    assert "FUNCTIONS" in lines[:120]
    assert "CLASSES" not in lines
    assert set(planner.__all__) <= set(dir(planner))


def test_names_for_type_checkers_are_those_that_are_imported() -> None:
    """`planner` names its public names twice: in imports that nothing runs, and in a table."""
    tree = ast.parse(Path(planner.__file__).read_text(encoding="utf-8"))
    unrun = next(part for part in tree.body if isinstance(part, ast.If))
    imported = {
        name.name: statement.module
        for statement in unrun.body
        if isinstance(statement, ast.ImportFrom)
        for name in statement.names
    }
    assert imported == planner._HOMES
    assert all(hasattr(planner, name) for name in imported)


def test_import_and_planning_load_no_torch() -> None:
    script = (
        "import sys, planner\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'networkx'} & set(sys.modules)\n"
        "planner.solve, planner.show, planner.price, planner.report, planner.cluster\n"
        "sys.exit(f'loaded {heavy}' if heavy else 'torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False, timeout=60).returncode
        == 0
    )


def test_a_bandwidth_without_its_unit_is_told() -> None:
    with pytest.raises(ClusterError, match="`bandwidth=10` is 10 bytes per second"):
        planner.cluster(gpus=4, bandwidth=10)


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["slove"], "did you mean solve?"),
        (["fit", "gpt2", "--gpus", "2", "--gpu", "rtx-4900"], "did you mean rtx-4090"),
        (["fit", "gpt2", "--gpus", "2", "--gpu", "A1000"], "did you mean a100 or"),
        (["solve", "--schedule", "1f1b-flsh"], "did you mean 1f1b-flush"),
    ],
)
def test_misspelt_choices_have_a_suggestion(
    arguments: list[str], meant: str, tmp_path: Path
) -> None:
    done = plan_verb(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert meant in done.stderr


def test_devices_are_found_in_any_case_and_suggested() -> None:
    parsed = build_parser().parse_args(["fit", "gpt2", "--gpus", "2", "--gpu", "A100"])
    assert parsed.gpu == "a100"
    with pytest.raises(InputError) as raised:
        planner.estimate(ROOT / "tests" / "docs" / "small_model.py", device="rtx-4900")
    assert raised.value.hint.startswith("did you mean rtx-4090")


def test_a_model_without_weights_is_estimated_as_its_file_is() -> None:
    with torch.device("meta"):
        model = small_model.build_model()
    spec = planner.in_memory(
        model,
        example_batch=small_model.example_batch,
        loss=small_model.loss,
        optimizer=small_model.optimizer,
    )
    file = ROOT / "tests" / "docs" / "small_model.py"
    described = planner.estimate(spec, batch_size=8, device="v100")
    assert described.layers == planner.estimate(file, batch_size=8, device="v100").layers
    assert all(parameter.is_meta for parameter in model.parameters())
