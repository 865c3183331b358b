"""The documents are true: README's tree is the folder, and every relative link leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.architecture.source import PACKAGE, ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", without_code(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_resolve(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def readme_tree() -> dict[str, str]:
    """Path inside the package -> description, from the fenced block under "## The tree".

    The first line is the package itself; each further line is an indented name (a folder's ends in a slash),
    two or more spaces, and one line on what it is for.
    """
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"^## The tree$.*?^```\w*\n(.*?)^```", readme, re.DOTALL | re.MULTILINE)
    assert block, 'README.md needs a heading "## The tree" with a fenced block after it'
    first, *lines = block[1].splitlines()
    assert first.split()[0] == "src/shardwise/"
    found: dict[str, str] = {}
    folders: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name, _, description = line.strip().partition("  ")
        folders = [(depth, folder) for depth, folder in folders if depth < indent]
        path = "".join(folder for _, folder in folders) + name
        found[path] = description.strip()
        if name.endswith("/"):
            folders.append((indent, name))
    return found


def test_readme_tree_is_the_folder() -> None:
    """A package's own __init__ is spoken for by its folder's line."""
    files = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
    folders = {f"{path.rpartition('/')[0]}/" for path in files if "/" in path}
    tree = readme_tree()
    assert set(tree) == folders | {path for path in files if not path.endswith("/__init__.py")}
    assert all(tree.values()), "every line of the tree says what the file is for"
