"""Files from users: JSON objects, and YAML and JSON documents as trees of texts, exactly as they were written.

A text is a Python string. Scalars in a tree are strings or None. They are not converted to YAML 1.1's numbers or dates,
so 1e-4 and "1e-4" are the same. Duplicate keys and tags are refused: no Python object is constructed from a tag. JSON
may have comments (`//`, `#`, `/* */`) and trailing commas, as DeepSpeed's files do. yaml is imported at first use.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ConfigurationError
from .files import read_regular

if TYPE_CHECKING:
    import yaml

# None, a string, or a list or dict of trees.
Tree = Any
# Keys that are written twice in a mapping, and their first and last lines.
Repeated = dict[str, tuple[int, int]]

MOST_BYTES = 4_000_000
MOST_NODES = 100_000
MOST_JSON_BYTES = 64 * 10**6
# An empty list is two bytes in a file, and takes thirty times as much memory when parsed. So the number of lists and
# objects in a file is limited: to this number, plus one for every eight bytes of the file.
MANY_BRACKETS = 1_000_000
YAML_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map")}
# JSON_COMMENT matches strings and comments. JSON_COMMA matches strings and trailing commas, once comments are removed.
# Strings are matched without backtracking (`*+`), even without a closing quote, so that the time stays linear.
JSON_STRING = r'("(?:\\.|[^"\\\n])*+"?+)'
JSON_COMMENT = re.compile(rf"{JSON_STRING}|(?://|#)[^\n]*|/\*.*?\*/|/(?=\*)", re.S)
JSON_COMMA = re.compile(rf"{JSON_STRING}|,(?=\s*[}}\]])", re.S)


def read_text(path: Path) -> str:
    """Read a text file of at most `MOST_BYTES`; refuse everything else."""
    try:
        return read_regular(path, MOST_BYTES).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:  # a name with a zero byte, bytes that are no text
        raise ConfigurationError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def yaml_tree(text: str, where: str, most_depth: int, repeated: Repeated | None = None) -> Tree:
    """Parse YAML. With `repeated`, a key may be written twice: the last one counts, and both lines are noted there."""
    node = yaml_node(text, where)
    return None if node is None else yaml_texts(node, where, most_depth, repeated)


def _num_nodes(node: "yaml.Node", known: dict[int, int]) -> int:
    """Count nodes, with aliases expanded. A node that contains itself counts as more than `MOST_NODES`."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # while its own parts are counted
        parts = node.value if isinstance(node.value, list) else []
        flat = [part for entry in parts for part in (entry if isinstance(entry, tuple) else (entry,))]
        known[id(node)] = 1 + sum(_num_nodes(part, known) for part in flat)
    return known[id(node)]


def yaml_node(text: str, where: str) -> "yaml.Node | None":
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None and _num_nodes(node, {}) > MOST_NODES:
            raise ConfigurationError(f"{where} refers to itself, or its aliases stand for too much; write it out")
        return node
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, why = f" line {mark.line + 1}" if mark else "", getattr(error, "problem", None) or error
        raise ConfigurationError(f"{where}{line} is not YAML: {' '.join(str(why).split())}") from None
    except RecursionError:
        raise ConfigurationError(f"{where} is nested too deep") from None


def yaml_pairs(
    node: "yaml.Node", where: str, repeated: Repeated | None = None
) -> Iterator[tuple[str, "yaml.Node", int]]:
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise ConfigurationError(f"{where} holds no mapping of keys to values; write key: value")
    seen: dict[str, int] = {}
    for name, value in node.value:
        line = name.start_mark.line + 1
        if name.tag.endswith(":merge"):
            raise ConfigurationError(f"{where} line {line}: merging (<<) is not understood; write the keys out")
        if not isinstance(name, yaml.ScalarNode) or name.tag not in YAML_TAGS:
            raise ConfigurationError(f"{where} line {line}: a key must be a plain word")
        if name.value in seen and repeated is None:
            raise ConfigurationError(f"{where}: {name.value} is said twice, in line {seen[name.value]} and line {line}")
        if name.value in seen and repeated is not None:
            repeated[name.value] = (seen[name.value], line)
        seen[name.value] = line
        yield name.value, value, line


def yaml_texts(node: "yaml.Node", where: str, most_depth: int, repeated: Repeated | None = None) -> Tree:
    import yaml

    line = node.start_mark.line + 1
    if node.tag not in YAML_TAGS:
        raise ConfigurationError(f"{where} line {line}: the tag {node.tag} is not understood; leave it out")
    if most_depth < 0:
        raise ConfigurationError(f"{where} line {line} is nested too deep")
    if isinstance(node, yaml.MappingNode):
        pairs = yaml_pairs(node, where, repeated)
        return {name: yaml_texts(value, where, most_depth - 1, repeated) for name, value, _ in pairs}
    if isinstance(node, yaml.SequenceNode):
        return [yaml_texts(value, where, most_depth - 1, repeated) for value in node.value]
    return None if node.tag.endswith(":null") else node.value


def json_tree(text: str, where: str) -> Tree:
    def without(found: re.Match[str]) -> str:
        if found[0] == "/":
            line = text.count("\n", 0, found.start()) + 1
            raise ConfigurationError(f"{where} line {line} is not JSON: a comment without an end")
        return found[1] or re.sub(r"[^\n]", " ", found[0])

    plain = JSON_COMMA.sub(without, JSON_COMMENT.sub(without, text))

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for name, value in found:
            if name in seen:
                raise ConfigurationError(f"{where}: {name} is said twice; leave one")
            seen[name] = value
        return seen

    def no_number(word: str) -> NoReturn:
        raise ConfigurationError(f"{where}: {word} is no number in JSON")

    try:
        return as_strings(
            json.loads(plain, object_pairs_hook=pairs, parse_int=str, parse_float=str, parse_constant=no_number)
        )
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where} line {error.lineno} is not JSON: {error.msg}") from None
    except RecursionError:
        raise ConfigurationError(f"{where} is nested too deep") from None


def as_strings(value: Any) -> Tree:
    """Convert all scalars of a Python or JSON value to strings."""
    if isinstance(value, dict):
        return {str(name): as_strings(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [as_strings(part) for part in value]
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def find(path: str | Path) -> Path | None:
    """Expand ~ and return the path of the file or folder; None if it does not exist or the path is not valid."""
    try:
        found = Path(path).expanduser()
        return found if found.exists() else None
    except (OSError, RuntimeError):
        return None


def parse(text: str | bytes) -> Any:
    """Parse JSON. It takes at most about ten times the memory of the text. Raises ValueError."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    num_brackets = content.count(b"[") + content.count(b"{")
    if num_brackets > MANY_BRACKETS + len(content) // 8:
        raise ValueError(f"it has {num_brackets:,} lists and objects in {len(content):,} bytes, too many to be read")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(path: Path, what: str = "") -> dict[str, Any]:
    """Read a JSON object; `what` names it in errors, instead of its path."""
    what = what or str(path)
    try:
        value = parse(read_regular(path, MOST_JSON_BYTES))
    except OSError as error:
        raise ConfigurationError(f"{what} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{what} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{what} holds a {type(value).__name__}, not an object")
    return value
