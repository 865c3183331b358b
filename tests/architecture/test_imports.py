"""Dependencies point one way: the packages that each package may import, and the same inside the core."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from tests.architecture.source import imported, module_name, trees

# The rings, inside out. `version` is free to all.
PACKAGES: dict[str, set[str]] = {
    "base": set(),
    "core": {"base"},
    "checkpoint": {"base", "core"},
    "planner": {"base", "core"},
    "api": {"base", "core", "planner"},
    "trainer": {"base", "core", "checkpoint", "planner", "api"},
    "migrate": {"base", "core", "planner", "trainer"},
    "integrations": {"base", "core", "checkpoint", "api"},
    "doctor": {"base", "core", "planner", "trainer"},
    "report": {"base", "planner", "trainer"},
    "": {"base", "core", "checkpoint", "planner", "api", "migrate"},  # the public names
    "bench": {"base", "core", "checkpoint", "planner", "trainer", "report", "api", ""},
    "cli": {"base", "core", "checkpoint", "planner", "trainer", "migrate", "doctor", "report", "bench"},
    "__main__": {"base", "cli"},
}

# The core's folders and files, inside out.
CORE: dict[str, set[str]] = {
    "native": set(),
    "saved_tensors": set(),
    "precision": set(),
    "wire": {"native"},
    "layout": {"wire"},
    "mesh": {"wire"},
    "schedule": {"wire", "layout", "precision"},
    "offload": {"native", "schedule"},
    "unit": {"wire", "schedule", "offload"},
    "optim": {"native", "wire", "mesh", "precision", "schedule", "offload", "unit"},
    "engine": {
        "native", "wire", "layout", "mesh", "precision", "saved_tensors", "schedule", "offload", "unit", "optim",
    },
}  # fmt: skip


def imports_by_module() -> dict[str, set[str]]:
    """The modules of ours that each module imports, wherever in the file it does."""
    modules = {module_name(path) for path in trees()}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, tree in trees().items():
        for node in ast.walk(tree):
            for name in imported(node, path):
                package, _, target = name.partition(".")
                if package == "shardwise":
                    # `from shardwise.core.layout import Layout` binds a name of a module, not a module.
                    owner = target if target in modules else target.rpartition(".")[0]
                    graph[module_name(path)].add(owner)
    return graph


def edges(prefix: str) -> dict[str, set[str]]:
    """Which of the folders and files directly under `prefix` import which others."""
    found: dict[str, set[str]] = {}
    for module, targets in imports_by_module().items():
        if not prefix or (module.startswith(prefix) and module != prefix.rstrip(".")):
            own = module.removeprefix(prefix).partition(".")[0]
            into = {target.removeprefix(prefix).partition(".")[0] for target in targets if target.startswith(prefix)}
            found.setdefault(own, set()).update(into - {own, "version"})
    found.pop("version", None)
    return found


@pytest.mark.parametrize(("prefix", "allowed"), [("", PACKAGES), ("core.", CORE)], ids=["packages", "core"])
def test_packages_import_inwards_only(prefix: str, allowed: dict[str, set[str]]) -> None:
    found = edges(prefix)
    wrong = {own: into - allowed.get(own, set()) for own, into in found.items() if into - allowed.get(own, set())}
    assert not wrong
    assert set(found) == set(allowed)
    TopologicalSorter(allowed).prepare()


def test_no_import_cycles() -> None:
    graph = {module: targets - {module} for module, targets in imports_by_module().items()}
    TopologicalSorter(graph).prepare()


def test_the_engine_loads_base_and_core_alone() -> None:
    code = """
import sys
import shardwise.core.engine.runtime, shardwise.core.engine.hooks, shardwise.core.engine.guards
print(*(name for name in sys.modules if name.startswith("shardwise.")))
"""
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {name for name in seen if name.split(".")[1] not in ("base", "core", "version")}
