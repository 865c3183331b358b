"""Write docs/architecture.md: the tree of the package, each file with the first sentence of its docstring.

python -m tests.support.module_map
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"
PAGE = ROOT / "docs" / "architecture.md"
START, END = "<!-- tree: made by `python -m tests.support.module_map` -->", "<!-- end of the tree -->"


def summary(file: Path) -> str:
    """The first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.:])\s", text, maxsplit=1)[0].rstrip(".:")


def rows(folder: Path, depth: int = 0) -> list[str]:
    found = []
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        indent = "  " * depth
        if path.is_dir() and (path / "__init__.py").exists():
            found += [f"{indent}{path.name}/  {summary(path / '__init__.py')}", *rows(path, depth + 1)]
        elif path.suffix == ".py" and (path.name != "__init__.py" or depth == 0):
            found.append(f"{indent}{path.name}  {summary(path)}")
    return found


def page() -> str:
    """The page with its tree made anew."""
    before, _, rest = PAGE.read_text().partition(START)
    tree = "\n".join(rows(PACKAGE))
    return f"{before}{START}\n```\n{tree}\n```\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
