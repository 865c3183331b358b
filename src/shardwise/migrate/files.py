"""Files that are read, and files that a key of one of them names."""

from pathlib import Path

from ..base.documents import Tree, json_tree, read_text, yaml_tree
from ..base.errors import ConfigurationError, printable
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


def named_file(block: Block, key: str, folder: Path) -> Block:
    """The file that a key names: its keys are told under the key. One that cannot be read is refused, and is empty.

    Accelerate, the Trainer, LLaMA-Factory and Axolotl look in the working directory, so that is looked in first; then
    in `folder`, where the file lies that names it.
    """
    name = block.text(key)
    if not name:
        block.refused(key, "it names no file")
        return block.opened(key, {})
    try:
        path, where = _place_of(Path(name).expanduser(), folder)
        tree = tree_of(path)
        if not isinstance(tree, dict):
            raise ConfigurationError(f"{path} holds no mapping of keys to values")
    except (ConfigurationError, OSError, ValueError, RuntimeError) as error:  # no home, a zero byte, a name too long
        block.refused(key, str(error))
        return block.opened(key, {})
    block.used(key, f"read from {printable(str(path))}{where}: its keys follow")
    return block.opened(key, tree)


def _place_of(path: Path, folder: Path) -> tuple[Path, str]:
    """Where it is, and which of the two places that is."""
    if path.is_absolute():
        return path, ""
    beside = folder / path
    if path.exists():
        return path, ", in the working directory"
    if beside.exists():
        return beside, ", next to the file that names it"
    both = f"in the working directory {Path.cwd()}"
    if beside.resolve() != path.resolve():
        both = f"neither {both} nor as {beside}, next to the file that names it"
    raise ConfigurationError(f"{path}: no such file, {both}")
