"""Write tables and help texts from the code into the pages, so that they cannot contradict it.

In a page, one of these lines

    <!-- fields: planner.formats.profile.Profile -->   becomes tables of the fields of that record and its parts,
    <!-- help: plan solve -->                          becomes what `plan solve --help-all` prints,
    <!-- devices: all -->                              becomes the table of devices that estimates know,
    <!-- script: one_host.sh -->                       becomes that file of docs/scripts,
    <!-- api: planner -->                              becomes signatures and docstrings of that module's public names,
    <!-- notebook: notebook.ipynb -->                  becomes the cells of that notebook of docs/examples.

A line right below it, which readers of the page in a clone see in its place, is left out.

A comment behind a field, in the code, is the field's description here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

HELP_COLUMNS = "100"
_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLES = Path(__file__).parent / "examples"
_KINDS = "fields|help|devices|script|api|notebook"
_MARKER = re.compile(rf"^<!-- ({_KINDS}): (.+?) -->$(?:\n\S.*)*", re.MULTILINE)
_COMMENTED_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with its markers replaced; mkdocs calls this for every page."""
    shown: set[type[BaseModel]] = set()

    def write(found: re.Match[str]) -> str:
        match found[1]:
            case "help":
                return help_text(found[2])
            case "devices":
                return device_table()
            case "script":
                return script(found[2])
            case "api":
                return api(found[2])
            case "notebook":
                return notebook(found[2])
            case _:
                return field_tables(found[2], shown)

    return _MARKER.sub(write, markdown)


def script(name: str) -> str:
    """Return a file of docs/scripts as a block of code."""
    path = SCRIPTS / name
    language = "yaml" if path.suffix == ".yaml" else "bash"
    return f'```{language} title="{name}"\n{path.read_text(encoding="utf-8").strip()}\n```'


def notebook(name: str) -> str:
    """Return the cells of a notebook of docs/examples: text, code and what it printed."""
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            printed = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts)


def api(module: str) -> str:
    """Return what a module's public names are: a signature and a docstring each; functions, and
    then types.
    """
    home = importlib.import_module(module)
    names = [*home.__all__, *(name for name in getattr(home, "_HOMES", ()) if not name.islower())]
    return "\n\n".join(_described(f"{module}.{name}", getattr(home, name)) for name in names)


def _described(name: str, what: Any) -> str:
    heading = f"### {name}"
    documented = inspect.getdoc(what) or ""
    if inspect.isclass(what) and issubclass(what, BaseModel):
        return f"{heading}\n\nA record. {documented.splitlines()[0]}"
    signature = inspect.signature(what)
    parameters = "".join(f"    {_parameter(each)},\n" for each in signature.parameters.values())
    is_class = inspect.isclass(what)
    returned = (
        "" if is_class or not signature.return_annotation else f" -> {signature.return_annotation}"
    )
    call = f"(\n{parameters})" if parameters else "()"
    code = f"{'class' if is_class else 'def'} {name.rpartition('.')[2]}{call}{returned}"
    return f"{heading}\n\n```python\n{code}\n```\n\n{_as_markdown(documented)}"


def _as_markdown(documented: str) -> str:
    """Return a docstring with its sections (Args, Returns, Raises) as lists, and its blocks of code
    as they are.
    """
    lines: list[str] = []
    section = False
    for line in documented.splitlines():
        indent = len(line) - len(line.lstrip())
        if line in _SECTIONS:
            section = True
            lines += [f"**{line[:-1]}**", ""]
        elif line == "Example:":
            section = False
            lines += ["**Example**", ""]
        elif line and not indent:
            section = False
            lines.append(line)
        elif section and indent == 4 and (item := re.match(r"    ([\w, .*]+): (.*)", line)):
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif section and line:
            lines.append(("  " if lines[-1].startswith(("- ", "  ")) else "") + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines)


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as the source has it: its annotation is text there."""
    annotation = f": {parameter.annotation}" if parameter.annotation is not parameter.empty else ""
    # a function has an address in its repr
    value = getattr(parameter.default, "__qualname__", repr(parameter.default))
    default = "" if parameter.default is parameter.empty else f" = {value}"
    return f"{parameter.name}{annotation}{default}"


def device_table() -> str:
    """Return a table of all devices with their peaks."""
    from planner.profiler.estimated.devices import DEVICES, DTYPES

    lines = [
        "| name | device | "
        + " | ".join(f"{dtype}, TFLOP/s" for dtype in DTYPES)
        + " | GB/s | memory |",
        "|---|---|" + "---|" * (len(DTYPES) + 2),
    ]
    for name, spec in DEVICES.items():
        peaks = [spec.peak_flops_per_s.get(dtype) for dtype in DTYPES]
        cells = [f"{peak / 1e12:g}" if peak is not None else "" for peak in peaks]
        memory = f"{spec.memory_bytes / 2**30:.1f} GiB" if spec.memory_bytes is not None else ""
        bandwidth = f"{spec.bandwidth_bytes_per_s / 1e9:g}"
        lines.append(
            f"| `{name}` | {spec.name} | " + " | ".join([*cells, bandwidth, memory]) + " |"
        )
    return "\n".join(lines)


def field_tables(path: str, shown: set[type[BaseModel]] | None = None) -> str:
    """Return a table for the record at `path` ("module.Class"), then one for each record inside it.

    Records in `shown` are left out. Those written are added to it, so that a page has each once.
    """
    shown = set() if shown is None else shown
    module, name = path.rsplit(".", 1)
    root: type[BaseModel] = getattr(importlib.import_module(module), name)
    fresh = [record for record in _records(root) if record not in shown]
    shown.update(fresh)
    return "\n\n".join(_field_table(record) for record in fresh)


def help_text(command: str) -> str:
    """Return what the help of a command prints, of a verb with all its options, as a block of code."""
    # Imported here: the tables of fields need no command line.
    from planner.cli.main import main

    program, *verbs = command.split()
    assert program == "plan"
    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = HELP_COLUMNS
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*verbs, "--help-all" if verbs else "--help"])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return f"```text\n{printed.getvalue().strip()}\n```"


def _records(root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return `root` and all records that its fields hold, each once, outer before inner."""
    found = [root]
    for record in found:  # grows while it is walked
        for field in record.model_fields.values():
            found += [inner for inner in _records_in(field.annotation) if inner not in found]
    return found


def _records_in(annotation: Any) -> list[type[BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in getattr(annotation, "__args__", ()) for inner in _records_in(part)]


def _field_table(record: type[BaseModel]) -> str:
    schema = record.model_json_schema()
    # The record that its own definitions contain stands behind a reference.
    properties = schema.get("properties") or schema["$defs"][record.__name__]["properties"]
    comments = dict(_COMMENTED_FIELD.findall(inspect.getsource(record)))
    lines = [f"### {record.__name__} {{ #{record.__name__.lower()} }}", "", _summary(record), ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in record.model_fields.items():
        default = "" if field.is_required() else f"`{json.dumps(field.default)}`"
        lines.append(
            f"| `{name}` | {_type(properties[name])} | {default} | "
            f"{_for_json(comments.get(name, ''))} |"
        )
    return "\n".join(lines)


def _summary(record: type[BaseModel]) -> str:
    return _for_json(inspect.getdoc(record) or "")


def _for_json(text: str) -> str:
    """Return the text with null for None, as the files have it."""
    return re.sub(r"\bNone\b", "null", text)


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(option) for option in schema["anyOf"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"{len(schema['prefixItems'])} of {_type(schema['prefixItems'][0])}"
    if schema["type"] == "array":
        least = f", at least {schema['minItems']}" if "minItems" in schema else ""
        return f"list of {_type(schema['items'])}{least}"
    bounds = [f"{sign} {_number(schema[key])}" for key, sign in _BOUNDS.items() if key in schema]
    return f"{schema['type']} {' and '.join(bounds)}".strip()


def _number(bound: float) -> str:
    """Return a bound with all digits, as far as these are few: 2147483648, 1e+15."""
    return str(bound) if isinstance(bound, int) and bound < 2**63 else f"{bound:g}"
