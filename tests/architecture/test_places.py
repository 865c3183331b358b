"""Where in the source a thing may appear, so that there is one place to look for it and one to change."""

import ast
import re
from collections.abc import Callable

from shardwise.core.layout import ALIASES, PRESETS
from tests.architecture.source import docstrings, names_used, trees

STREAM_NAMES = {
    "Stream", "ExternalStream", "StreamContext", "Event", "stream", "set_stream",
    "current_stream", "default_stream",
}  # fmt: skip
STREAM_METHODS = {"wait_stream", "wait_event", "record_event"}


def uses(name_is: Callable[[str], bool], allowed: tuple[str, ...]) -> list[str]:
    """Where names for which `name_is` holds are used outside the allowed files and folders."""
    return sorted(
        {
            f"src/shardwise/{path}:{line} uses {name}"
            for path in trees()
            if not path.startswith(allowed)
            for line, name in names_used(path)
            if name_is(name)
        }
    )


# `bench` stands beside the engine: it plays a fabric, starts ranks and runs other libraries.


def test_torch_distributed_is_called_in_wire_and_mesh_only() -> None:
    def distributed(name: str) -> bool:
        return f"{name}.".startswith(("torch.distributed.", "torch._C._distributed"))

    launcher = ("trainer/agent.py", "trainer/loopback.py")
    assert not uses(
        distributed,
        allowed=("core/wire/", "core/mesh.py", "checkpoint/interop/dcp_write.py", *launcher, "doctor/", "bench/"),
    )


def test_streams_are_used_in_one_file() -> None:
    def stream(name: str) -> bool:
        last = name.rpartition(".")[2]
        return last in STREAM_METHODS or (name.startswith("torch.") and last in STREAM_NAMES)

    assert not uses(stream, allowed=("core/engine/streams.py", "bench/"))


def test_the_environment_is_read_where_a_process_begins_only() -> None:
    def environment(name: str) -> bool:
        return re.match(r"os\.(environ|getenv|putenv)", name) is not None

    # What is compiled goes where the user keeps caches.
    caches = "core/native/library.py"
    starting = ("base/processes.py", "trainer/launcher.py", "trainer/rank.py", "doctor/measure.py")
    allowed = ("core/mesh.py", "trainer/config.py", *starting, "cli/", "bench/", caches)
    assert not uses(environment, allowed)


def test_what_is_nowhere() -> None:
    """State is a value, not an attribute's presence; events keep lifetimes."""

    def banned(name: str) -> bool:
        return name == "hasattr" or name.endswith("record_stream")

    assert not uses(banned, allowed=())


def test_pickles_are_read_in_one_file() -> None:
    """That file restricts the unpickler, so that loading executes nothing."""

    def pickles(name: str) -> bool:
        return re.match(r"_?c?pickle\b", name) is not None

    assert not uses(pickles, allowed=("checkpoint/interop/pickles.py",))


def test_preset_names_are_known_to_layout_the_command_line_and_the_table_of_others_only() -> None:
    presets = {*PRESETS, *ALIASES}
    # A peer may have a preset's name.
    peers = ("bench/case.py", "bench/contenders.py")
    allowed = ("core/layout.py", "cli/", *peers)
    found = [
        f"src/shardwise/{path}:{node.lineno} says {node.value!r}"
        for path, tree in trees().items()
        if not path.startswith(allowed)
        for node in {*ast.walk(tree)} - docstrings(path)
        if isinstance(node, ast.Constant)
        and node.value in presets
        # What another library calls a thing is a word of its configurations.
        and not (path.startswith("migrate/") and node.value in ("fsdp", "ddp"))
    ]
    assert not found
