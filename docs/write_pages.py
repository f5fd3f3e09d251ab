"""Write tables and listings from the code into the pages, so that they cannot contradict it.

    python -m docs.write_pages            # write the pages anew
    python -m docs.write_pages --check    # name the pages that are not current; exit status 1

In a page, what stands between one of these lines and the line `<!-- end -->` is written here:

    <!-- fields: planner.formats.profile.Profile -->   tables of the fields of that record and its
                                                       parts
    <!-- verbs: plan -->                               a table of all verbs
    <!-- options: plan solve -->                       tables of a verb's arguments and options
    <!-- axes: all -->                                 a table of stage options and schedules
    <!-- devices: all -->                              a table of the devices that estimates know
    <!-- script: one_host.sh -->                       that file of docs/scripts
    <!-- api: planner -->                              signatures and docstrings of a module's
                                                       public names
    <!-- notebook: notebook.ipynb -->                  the cells of that notebook of docs/examples
    <!-- recording: solve-vgg -->                      a session of docs/recordings
    <!-- recording: one-to-sixty-four 2 -->            its second command, with the answer

A comment behind a field, in the code, is the field's description here. README.md becomes
`package-page.md`, which the package index shows.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from docs.axes import axis_table
from docs.notebook import SVG, picture_name
from docs.package_page import PAGE, package_page

DOCS = Path(__file__).parent
SCRIPTS = DOCS / "scripts"
EXAMPLES = DOCS / "examples"
RECORDINGS = DOCS / "recordings"
END = "<!-- end -->"
# names and a colon; a sentence that has a colon is none
_ENTRY = re.compile(r"    ((?:[\w,* ]|\.(?! ))+):(?: (.*))?$")
_SECTIONS = ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
_KINDS = "axes|fields|verbs|options|devices|script|api|notebook|recording"
_WRITTEN = re.compile(rf"^(<!-- ({_KINDS}): (.+?) -->\n).*?^({END})$", re.MULTILINE | re.DOTALL)
_COMMENTED_FIELD = re.compile(r"^    (\w+): .*?  # (.+)$", re.MULTILINE)
_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def written(page: str) -> str:
    """Return the page with everything between its markers made anew."""
    shown: set[type[BaseModel]] = set()

    def write(found: re.Match[str]) -> str:
        made = _made(found[2], found[3], shown)
        return f"{found[1]}\n{made}\n\n{found[4]}"

    return _WRITTEN.sub(write, page)


def _made(kind: str, name: str, shown: set[type[BaseModel]]) -> str:
    match kind:
        case "axes":
            return axis_table()
        case "verbs":
            return verb_table()
        case "options":
            return option_tables(name)
        case "devices":
            return device_table()
        case "script":
            return script(name)
        case "api":
            return api(name)
        case "notebook":
            return notebook(name)
        case "recording":
            return recording(name)
        case _:
            return field_tables(name, shown)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Yield each page that is not current, with the text that it should have."""
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        new = package_page() if path == PAGE else written(page)
        if new != page:
            yield path, new


def script(name: str) -> str:
    """Return a file of docs/scripts as a block of code."""
    path = SCRIPTS / name
    language = "yaml" if path.suffix == ".yaml" else "bash"
    return f'```{language} title="{name}"\n{path.read_text(encoding="utf-8").strip()}\n```'


def notebook(name: str) -> str:
    """Return the cells of a notebook of docs/examples: text, code, and what it printed and drew."""
    path = EXAMPLES / name
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    parts = []
    for number, cell in enumerate(cells):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if SVG in output.get("data", {}):
                parts.append(f"![What the cell draws](images/{picture_name(path.stem, number)})")
                continue
            printed = "".join(output.get("text") or output["data"]["text/plain"]).rstrip()
            parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts)


def recording(name: str) -> str:
    """Return a session that `python -m docs.recording` made, or one of its commands by number."""
    session, _, number = name.partition(" ")
    text = (RECORDINGS / f"{session}.txt").read_text(encoding="utf-8").strip()
    if number:
        text = re.split(r"\n+(?=\$ )", text)[int(number) - 1]
    return f"```text\n{text}\n```"


def api(module: str) -> str:
    """Return what a module's public names are: a signature and a docstring each; functions, and
    then types.
    """
    home = importlib.import_module(module)
    # Integrations need other packages than these pages, and have pages of their own.
    homes: Mapping[str, str] = getattr(home, "_HOMES", {})
    types = [name for name in homes if not name.islower() and "integrations" not in homes[name]]
    names = [*home.__all__, *types]
    return "\n\n".join(_described(f"{module}.{name}", getattr(home, name)) for name in names)


def _described(name: str, what: Any) -> str:
    heading = f"### {name}"
    documented = inspect.getdoc(what) or ""
    if inspect.isclass(what) and issubclass(what, BaseModel):
        return f"{heading}\n\nA record. {documented.splitlines()[0]}"
    signature = inspect.signature(what)
    parameters = "".join(f"    {_parameter(each)},\n" for each in signature.parameters.values())
    is_class = inspect.isclass(what)
    has_result = not is_class and signature.return_annotation is not signature.empty
    returned = f" -> {_annotation(signature.return_annotation)}" if has_result else ""
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
        elif section and indent == 4 and (item := _ENTRY.match(line)):
            lines.append(f"- `{item[1]}`: {item[2] or ''}".rstrip())
        elif section and line:
            lines.append(("  " if lines[-1].startswith(("- ", "  ")) else "") + line.strip())
        else:
            lines.append(line)
    return "\n".join(lines)


def _parameter(parameter: inspect.Parameter) -> str:
    """Return a parameter as the source has it."""
    has_annotation = parameter.annotation is not parameter.empty
    annotation = f": {_annotation(parameter.annotation)}" if has_annotation else ""
    # a function has an address in its repr
    value = getattr(parameter.default, "__qualname__", repr(parameter.default))
    default = "" if parameter.default is parameter.empty else f" = {value}"
    return f"{parameter.name}{annotation}{default}"


def _annotation(annotation: Any) -> str:
    """Return a type as people write it, without the modules of its names."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


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


def verb_table() -> str:
    """Return a table of the verbs, in the groups of `plan --help`."""
    from planner.cli.main import GROUPS, build_parser

    summaries = {action.dest: action.help for action in _verbs(build_parser())._choices_actions}
    lines = ["| | verb | does |", "|---|---|---|"]
    for group, names in GROUPS.items():
        for name in names:
            link = f"[`plan {name}`](#plan-{name})"
            lines.append(f"| {group} | {link} | {_cell(summaries[name] or '')} |")
            group = ""
    return "\n".join(lines)


def option_tables(command: str) -> str:
    """Return what a verb does, its arguments and usual options, and the options that `--help-all`
    adds.
    """
    from planner.cli.main import build_parser
    from planner.cli.parser import is_advanced

    parser = _verbs(build_parser()).choices[command.removeprefix("plan ")]
    actions = [
        action
        for action in parser._actions
        if not {"--help", "--help-all", "-v"} & set(action.option_strings)
    ]
    usual = [_option_row(parser, action) for action in actions if not is_advanced(action)]
    others = [_option_row(parser, action) for action in actions if is_advanced(action)]
    head = ["| option | meaning |", "|---|---|"]
    parts = [_description(parser.description or ""), "\n".join(head + usual)]
    if others:
        parts += ["Shown by `--help-all`:", "\n".join(head + others)]
    return "\n\n".join(parts)


def _verbs(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[Any]:
    return next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )


def _description(text: str) -> str:
    """Return the text of a help: wrapped paragraphs, and indented examples as code."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("    "):
            paragraphs.append(f"```text\n{textwrap.dedent(paragraph)}\n```")
        else:
            paragraphs.append(_wrapped(paragraph))
    return "\n\n".join(paragraphs)


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(" ".join(paragraph.split()), 100, break_on_hyphens=False)


def _option_row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {_value(action)}"
    names = action.option_strings or [action.dest]
    flags = ", ".join(f"`{name}`" for name in names[:-1])
    last = f"`{names[-1]}{value if action.option_strings else ''}`"
    meaning = parser._get_formatter()._expand_help(action)
    lines = "<br>".join(map(_cell, meaning.splitlines()))
    return f"| {flags}{', ' if flags else ''}{last} | {lines} |"


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    value = str(action.metavar or action.dest.upper())
    return f"[{value}]" if action.nargs == "?" else value


def _cell(text: str) -> str:
    """Return a text for a cell of a table: on one line, with nothing that Markdown reads."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    pieces[::2] = [re.sub(r"([*_<>])", r"\\\1", piece) for piece in pieces[::2]]
    return "".join(pieces).replace("|", r"\|")


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


def main(argv: Sequence[str]) -> int:
    """Write the pages that are not current, or only name them; return the exit status."""
    stale = list(stale_pages())
    for path, text in stale:
        print(path)
        if "--check" not in argv:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and "--check" in argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
