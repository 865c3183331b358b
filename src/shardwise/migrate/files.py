"""Files that are read, and files that a key of one of them names."""

from pathlib import Path

from ..documents import Tree, json_tree, read_text, yaml_tree
from ..errors import ConfigurationError
from .account import Block

# Deeper than any of them goes.
DEPTH = 12


def tree_of(path: Path) -> Tree:
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file")
    text = read_text(path)
    where = f"file {path}"
    if path.suffix.lower() in (".yaml", ".yml"):
        return yaml_tree(text, where, DEPTH)
    return json_tree(text, where)


def named_file(block: Block, key: str, folder: Path) -> tuple[Block, Path] | None:
    """The file that a key names, relative to the folder of the file that names it: its keys are told under the key."""
    name = block.text(key)
    if not name:
        block.refused(key, "it names no file")
        return None
    try:
        path = folder / Path(name).expanduser()
        tree = tree_of(path)
    except (ConfigurationError, OSError, ValueError, RuntimeError) as error:  # no home, a zero byte, a name too long
        block.refused(key, str(error))
        return None
    if not isinstance(tree, dict):
        block.refused(key, "the file holds no mapping of keys to values")
        return None
    block.used(key, "read: its keys follow")
    return block.opened(key, tree), path.parent
