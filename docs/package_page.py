"""The description that the package index shows, `docs/package-page.md`: README.md, with links that
work there.

The index shows no file of the repository. So links to such files lead to the repository where
pyproject.toml names one (`[project.urls]`, Repository); without it, their text stands alone.
`python -m docs.write_pages` writes it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "package-page.md"
_REPOSITORY = re.compile(r'^Repository = "(.+?)/?"$', re.MULTILINE)
_LINKED_PICTURE = re.compile(r"\[!\[([^\]]*)\]\(([^()\s]+)\)\]\(([^()\s]+)\)\n?")
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^()\s]+)\)")
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^()\s]+)\)")
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_ABSOLUTE = re.compile(r"https?://")


def package_page() -> str:
    """Return the page that README.md and pyproject.toml make."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return description(readme, _repository())


def description(readme: str, repository: str | None = None) -> str:
    """Return a page of Markdown without relative links.

    Args:
        readme: the page. Badges about the repository's own state are left out of it.
        repository: where relative links lead; None for nowhere.
    """
    text = _COMMENT.sub("", readme)
    text = _LINKED_PICTURE.sub(_badge, text)
    if repository is not None:
        text = _PICTURE.sub(lambda found: _absolute(found, f"{repository}/raw/HEAD/"), text)
        return _LINK.sub(lambda found: _absolute(found, f"{repository}/blob/HEAD/"), text)
    text = _PICTURE.sub(
        lambda found: found[0] if _ABSOLUTE.match(found[2]) else f"*{found[1]}*", text
    )
    return _LINK.sub(lambda found: found[0] if _leads(found[2]) else found[1], text)


def _badge(found: re.Match[str]) -> str:
    name, picture, target = found.groups()
    if not _ABSOLUTE.match(picture):
        return ""
    drawn = f"![{name}]({picture})"
    return f"[{drawn}]({target})\n" if _ABSOLUTE.match(target) else f"{drawn}\n"


def _absolute(found: re.Match[str], base: str) -> str:
    return (
        found[0] if _leads(found[2]) else found[0].replace(f"]({found[2]})", f"]({base}{found[2]})")
    )


def _leads(target: str) -> bool:
    """Return whether a link works wherever its page is: to another site, or within the page."""
    return bool(_ABSOLUTE.match(target)) or target.startswith("#")


def _repository() -> str | None:
    found = _REPOSITORY.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found[1] if found else None
