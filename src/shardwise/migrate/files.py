"""Configuration files, and files that a key of one of them names."""

from pathlib import Path

from ..base.documents import Tree, json_tree, read_text, yaml_tree
from ..base.errors import ConfigurationError, printable
from .account import Block

MAX_DEPTH = 12


def tree_of(path: Path) -> Tree:
    if not path.exists():
        raise ConfigurationError(f"{path}: no such file")
    text = read_text(path)
    where = f"file {path}"
    if path.suffix.lower() in (".yaml", ".yml"):
        return yaml_tree(text, where, MAX_DEPTH)
    return json_tree(text, where)


def named_file(block: Block, key: str, folder: Path) -> Block:
    """Read the file that a key names; its entries stand under the key. An unreadable file is refused, and empty.

    The working directory comes first, as in Accelerate, the Trainer, LLaMA-Factory and Axolotl; then `folder`, which
    has the file that names it.
    """
    name = block.text(key)
    if not name:
        block.refused(key, "it names no file")
        return block.opened(key, {})
    try:
        path, where = _place_of(Path(name).expanduser(), folder)
        tree = tree_of(path)
        if not isinstance(tree, dict):
            raise ConfigurationError(f"{path} is not a mapping of keys to values")
    except (ConfigurationError, OSError, ValueError, RuntimeError) as error:  # no home, a zero byte, a name too long
        block.refused(key, str(error))
        return block.opened(key, {})
    block.used(key, f"read from {printable(str(path))}{where}: its keys follow")
    return block.opened(key, tree)


def _place_of(path: Path, folder: Path) -> tuple[Path, str]:
    """The path of the file, and which of the two folders it is in."""
    if path.is_absolute():
        return path, ""
    neighbour = folder / path
    if path.exists():
        return path, ", in the working directory"
    if neighbour.exists():
        return neighbour, ", next to the file that names it"
    both = f"in the working directory {Path.cwd()}"
    if neighbour.resolve() != path.resolve():
        both = f"neither {both} nor as {neighbour}, next to the file that names it"
    raise ConfigurationError(f"{path}: no such file, {both}")
