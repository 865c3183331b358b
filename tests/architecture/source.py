"""The package's source as syntax trees, and the few questions the architecture tests ask of it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "shardwise"


@cache
def trees() -> dict[str, ast.Module]:
    """Every source file by its path inside the package ("wire/codec.py"), parsed."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(), str(file)) for file in files}


def module_name(path: str) -> str:
    """The dotted name inside the package: "wire/codec.py" is "wire.codec", the root "__init__.py" is ""."""
    return path.removesuffix(".py").replace("/", ".").removesuffix("__init__").removesuffix(".")


def dotted(node: ast.AST) -> str:
    """`a.b.c` as text; what is no name stands as "?", so that `f().b` is "?.b"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def imported(node: ast.AST, path: str) -> Iterator[str]:
    """The full dotted names that an import statement in `path` binds; relative ones are resolved."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            folders = ["shardwise", *Path(path).parent.parts]
            above = folders[: len(folders) - node.level + 1]
            base = ".".join([*above, base]).rstrip(".")
        yield from (f"{base}.{alias.name}" for alias in node.names)


def names_used(path: str) -> Iterator[tuple[int, str]]:
    """Every imported name and every dotted chain in a file, aliases of modules undone, with its line."""
    aliases: dict[str, str] = {}
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, name in zip(node.names, imported(node, path), strict=True):
                if alias.asname or isinstance(node, ast.ImportFrom):
                    aliases[alias.asname or alias.name] = name
                yield node.lineno, name
    for node in ast.walk(trees()[path]):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = dotted(node).partition(".")
            full = aliases.get(head, head)
            yield node.lineno, f"{full}.{rest}" if rest else full


def docstrings(path: str) -> set[ast.AST]:
    """The string nodes of a file that are documentation: any string that is a statement of its own."""
    return {node.value for node in ast.walk(trees()[path]) if isinstance(node, ast.Expr)}
