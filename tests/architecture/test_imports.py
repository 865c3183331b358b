"""Dependencies point one way. A new package is one line in the table."""

import ast
from graphlib import TopologicalSorter

from tests.architecture.source import imported, module_name, trees

# A module may import from its own layer and from those below. The longest prefix counts.
LAYERS: dict[str, int] = {
    "errors": 0,
    "documents": 0,
    "json_file": 0,
    "regular_file": 0,
    "version": 0,
    "cgroup": 0,
    "processes": 0,
    "shard": 0,
    "dtypes": 0,
    "kept": 0,
    "precision": 0,
    "direct_io": 0,
    "layout": 1,
    "wire.codec": 1,
    "wire.ledger": 1,
    "store": 1,
    "wire": 2,
    "mesh": 2,
    "plan": 2,
    "away": 3,
    "unit": 3,
    "optim.host": 1,
    "optim": 4,
    "engine": 5,
    "checkpoint": 6,
    "train": 7,
    "report": 7,
    "": 8,  # the package's own __init__: the API
    "config": 8,
    "migrate": 8,
    "bench": 9,
    "doctor": 9,
    "integrations": 9,
    "cli": 10,
    "__main__": 11,
}


def layer(module: str) -> int:
    parts = module.split(".")
    prefixes = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    found = next((LAYERS[prefix] for prefix in prefixes if prefix in LAYERS), None)
    assert found is not None, f"shardwise.{module} has no layer; give it one in LAYERS"
    return found


def imports_by_module() -> dict[str, set[str]]:
    """The modules of ours that each module imports, wherever in the file it does."""
    modules = {module_name(path) for path in trees()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            for name in imported(node, path):
                package, _, target = name.partition(".")
                if package == "shardwise":
                    # `from shardwise.layout import Layout` binds a name of a module, not a module.
                    owner = target if target in modules else target.rpartition(".")[0]
                    graph[module_name(path)].add(owner)
    return graph


def test_every_module_has_a_layer_and_imports_downwards() -> None:
    wrong = [
        f"shardwise.{module} (layer {layer(module)}) imports shardwise.{target} (layer {layer(target)})"
        for module, targets in imports_by_module().items()
        for target in sorted(targets)
        if layer(target) > layer(module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    graph = {module: targets - {module} for module, targets in imports_by_module().items()}
    TopologicalSorter(graph).prepare()
